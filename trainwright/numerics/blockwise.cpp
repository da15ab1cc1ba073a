// One pass over a parameter whose moments are 8-bit codes: decode, update, encode, block by block.
//
// The dynamic map (quantise.py) by arithmetic: with t = n + k for interval k of the n of its decade,
//     value = slope[decade] * k/n + offset[decade],    t = min(floor(|x| * gain[decade] + shift[decade]), last[decade])
// so that k/n is the fraction of the float t, and the decade its exponent.

#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

static const int DECADES = 8;  // the eighth is the value 1

struct Map {
    Floats slope, offset, gain, shift, last;
    float threshold[DECADES];
};

extern "C" struct Settings {
    float decay, beta1, fresh1, beta2, fresh2, step_size, root, eps;  // fresh: 1 - beta, rounded once
};

template <typename T> static inline T load(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

template <typename T> static inline void store(void* to, T value) { std::memcpy(to, &value, sizeof(T)); }

static inline Floats as_floats(Ints bits) { return load<Floats>(&bits); }
static inline Ints as_bits(Floats values) { return load<Ints>(&values); }
static inline Floats all(float value) { return value - Floats{}; }
static inline Floats absolute(Floats x) { return as_floats(as_bits(x) & 0x7fffffff); }
static inline Floats larger(Floats x, Floats y) { return x > y ? x : y; }

static inline Floats look_up(Floats table, Ints index) { return __builtin_shuffle(table, index & (LANES - 1)); }

static Map read_map(const float* tables) {
    Map map;
    Floats* rows[] = {&map.slope, &map.offset, &map.gain, &map.shift, &map.last};
    for (int row = 0; row < 5; ++row) {
        float padded[LANES] = {0};
        std::memcpy(padded, tables + row * DECADES, sizeof(float) * DECADES);
        *rows[row] = load<Floats>(padded);
    }
    std::memcpy(map.threshold, tables + 5 * DECADES, sizeof(float) * DECADES);
    return map;
}

// Plain loops: compilers turn these into one instruction, but not the conversion of a vector type.
static inline void widen(const uint8_t* codes, int64_t length, int32_t* wide) {
    for (int64_t i = 0; i < length; ++i) wide[i] = codes[i];
}

static inline void narrow(const int32_t* wide, int64_t length, uint8_t* codes) {
    for (int64_t i = 0; i < length; ++i) codes[i] = static_cast<uint8_t>(wide[i]);
}

template <bool SIGNED> static inline Floats decode(Ints code, const Map& map) {
    Ints t = SIGNED ? (code < 127 ? 127 - code : code - 127) : code + 1;
    Ints bits = as_bits(__builtin_convertvector(t, Floats));
    Ints decade = (bits >> 23) - (SIGNED ? 127 : 128);
    Floats fraction = as_floats((bits & 0x7fffff) | 0x3f800000) - 1.0f;
    Floats value = look_up(map.slope, decade) * fraction + look_up(map.offset, decade);
    value = code == (SIGNED ? 127 : 0) ? Floats{} : value;
    return SIGNED ? (code < 127 ? -value : value) : value;
}

template <bool SIGNED> static inline Ints encode(Floats x, const Map& map) {
    Floats y = absolute(x);
    Ints above = {};
    for (int i = 0; i < DECADES; ++i) above -= y > all(map.threshold[i]);
    Ints decade = above - 1;
    Floats exact = y * look_up(map.gain, decade) + look_up(map.shift, decade);
    Floats last = look_up(map.last, decade);
    Ints t = __builtin_convertvector(exact < last ? exact : last, Ints);
    if (!SIGNED) return above == 0 ? Ints{} : t - 1;
    t = above == 0 ? Ints{} : t;
    Ints below = t > 127 ? Ints{} + 127 : t;
    return x < Floats{} ? 127 - (below == 0 ? below + 1 : below) : 127 + t;
}

struct Operands {
    float* param;
    const float* grad;
    uint8_t *first, *second;
};

// A block's codes as integers and its moments as floats, between the passes.
struct Room {
    std::vector<int32_t> first_codes, second_codes;
    std::vector<float> first, second;
    explicit Room(int64_t size) : first_codes(size), second_codes(size), first(size), second(size) {}
};

struct Scales {
    float first, second;
};

template <bool ADAM>
static inline void update(const Operands& at, int64_t i, Room& room, Scales scales, const Map& first, const Map& second,
                          const Settings& s, Floats& top_first, Floats& top_second) {
    Floats param = load<Floats>(at.param + i), raw = load<Floats>(at.grad + i);
    Ints finite = (raw - raw) == Floats{};
    Floats grad = finite ? raw : Floats{}, moved;
    Floats m = decode<true>(load<Ints>(&room.first_codes[i]), first) * scales.first;
    if (ADAM) {
        Floats v = decode<false>(load<Ints>(&room.second_codes[i]), second) * scales.second;
        m = m + s.fresh1 * (grad - m);
        v = v * s.beta2 + s.fresh2 * grad * grad;
        Floats root;
        for (int lane = 0; lane < LANES; ++lane) root[lane] = __builtin_sqrtf(v[lane]);
        moved = param * s.decay - s.step_size * m / (root * s.root + s.eps);
        v = finite ? v : Floats{};
        store(&room.second[i], v);
        top_second = larger(v, top_second);
    } else {
        m = m * s.beta1 + grad + s.decay * param;
        moved = param - s.step_size * m;
    }
    m = finite ? m : Floats{};
    store(&room.first[i], m);
    top_first = larger(absolute(m), top_first);
    store(at.param + i, finite ? moved : param);
}

static inline float largest(Floats values) {
    float found = 0.0f;
    for (int i = 0; i < LANES; ++i) found = values[i] > found ? values[i] : found;
    return found;
}

template <bool SIGNED>
static void encode_block(float top, float* scale, const std::vector<float>& wide, std::vector<int32_t>& integers,
                         uint8_t* codes, int64_t length, const Map& map) {
    float down = 1.0f / (top > 1e-38f ? top : 1e-38f);
    for (int64_t i = 0; i < length; i += LANES) store(&integers[i], encode<SIGNED>(load<Floats>(&wide[i]) * down, map));
    narrow(integers.data(), length, codes);
    *scale = top;
}

// A block whose length is a multiple of LANES.
template <bool ADAM>
static void whole_block(Operands at, int64_t length, float* first_scale, float* second_scale, Room& room,
                        const Map& first, const Map& second, const Settings& settings) {
    Floats top_first = {}, top_second = {};
    Scales scales = {*first_scale, ADAM ? *second_scale : 0.0f};
    widen(at.first, length, room.first_codes.data());
    if (ADAM) widen(at.second, length, room.second_codes.data());
    for (int64_t i = 0; i < length; i += LANES)
        update<ADAM>(at, i, room, scales, first, second, settings, top_first, top_second);
    encode_block<true>(largest(top_first), first_scale, room.first, room.first_codes, at.first, length, first);
    if (ADAM)
        encode_block<false>(largest(top_second), second_scale, room.second, room.second_codes, at.second, length, second);
}

struct Padded {
    std::vector<float> param, grad;
    std::vector<uint8_t> first, second;
};

// A block of any length, through copies padded with zeros: the signed map's zero is code 127.
template <bool ADAM>
static void short_block(Operands at, int64_t length, float* first_scale, float* second_scale, Room& room,
                        const Map& first, const Map& second, const Settings& settings) {
    int64_t padded = (length + LANES - 1) / LANES * LANES;
    Padded copy = {std::vector<float>(padded), std::vector<float>(padded), std::vector<uint8_t>(padded, 127),
                   std::vector<uint8_t>(padded)};
    std::memcpy(copy.param.data(), at.param, length * sizeof(float));
    std::memcpy(copy.grad.data(), at.grad, length * sizeof(float));
    std::memcpy(copy.first.data(), at.first, length);
    if (ADAM) std::memcpy(copy.second.data(), at.second, length);
    whole_block<ADAM>({copy.param.data(), copy.grad.data(), copy.first.data(), copy.second.data()}, padded, first_scale,
                      second_scale, room, first, second, settings);
    std::memcpy(at.param, copy.param.data(), length * sizeof(float));
    std::memcpy(at.first, copy.first.data(), length);
    if (ADAM) std::memcpy(at.second, copy.second.data(), length);
}

template <bool ADAM>
static void blocks(int64_t begin, int64_t end, int64_t num_elements, int64_t block_size, float* param, const float* grad,
                   uint8_t* first, float* first_scales, uint8_t* second, float* second_scales, const float* tables,
                   const Settings* settings) {
    Map signed_map = read_map(tables), unsigned_map = read_map(tables + 6 * DECADES);
    Room room(block_size + LANES);
    for (int64_t block = begin; block < end; ++block) {
        int64_t start = block * block_size;
        int64_t length = num_elements - start < block_size ? num_elements - start : block_size;
        Operands at = {param + start, grad + start, first + start, ADAM ? second + start : first + start};
        auto run = length % LANES ? short_block<ADAM> : whole_block<ADAM>;
        run(at, length, first_scales + block, ADAM ? second_scales + block : nullptr, room, signed_map, unsigned_map,
            *settings);
    }
}

extern "C" void adam_blocks(int64_t begin, int64_t end, int64_t num_elements, int64_t block_size, float* param,
                            const float* grad, uint8_t* first, float* first_scales, uint8_t* second,
                            float* second_scales, const float* tables, const Settings* settings) {
    blocks<true>(begin, end, num_elements, block_size, param, grad, first, first_scales, second, second_scales, tables,
                 settings);
}

extern "C" void momentum_blocks(int64_t begin, int64_t end, int64_t num_elements, int64_t block_size, float* param,
                                const float* grad, uint8_t* first, float* first_scales, const float* tables,
                                const Settings* settings) {
    blocks<false>(begin, end, num_elements, block_size, param, grad, first, first_scales, nullptr, nullptr, tables,
                  settings);
}
