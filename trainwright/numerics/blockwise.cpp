// One pass over a parameter whose moments are 8-bit codes: decode, update, encode, block by block.
//
// The dynamic map (quantise.py) by arithmetic: with t = n + k for interval k of the n of its decade,
//     value = (t + 1/2) * slope[decade] + offset[decade],    decade from the exponent of the float t + 1/2
//     t - 1 = min(|value| * gain[decade] + shift[decade], last[decade]), rounded down
// A code is t - 1 of the unsigned map, and 127 ± t of the signed one. The values 0 and 1 are decades of their own.

#include <cstdint>
#include <cstring>
#include <omp.h>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#define LANES 16
#else
#define LANES 8
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

static const int DECADES = 9;   // the first is the value 0, the last the value 1
static const int COLUMNS = 16;  // of a table by decade
static const int OCTAVES = 32;
static const float SMALLEST = 5e-10f;  // 0 in both maps, as all below it, and within 32 octaves of 1
static const int64_t AHEAD = 1024;     // elements between what is fetched and what is worked on

extern "C" struct Settings {
    float decay, beta1, fresh1, beta2, fresh2, step_size, root, eps;  // fresh: 1 - beta, rounded once
    float sign;  // of the gradient: -1 where it is climbed
};

struct Table {
    Floats part[COLUMNS / LANES];
};

struct Map {
    Table slope, offset;      // by the exponent's last four bits
    Table gain, shift, last;  // by decade
    float threshold[DECADES];  // above it, a magnitude is at least of that decade
    float edge[OCTAVES];       // by the last five bits of a magnitude's exponent: the threshold in that octave, if any
    int32_t below[OCTAVES];    // and the decade below it
};

template <typename T> static inline T load(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

template <typename T> static inline void store(void* to, T value) { std::memcpy(to, &value, sizeof(T)); }

static inline Floats all(float value) { return value - Floats{}; }
static inline Floats absolute(Floats x) { return (Floats)((Ints)x & 0x7fffffff); }
static inline Ints exponent(Floats x) { return (Ints)x >> 23; }

// What vector types do not spell: in AVX-512's own words, or lane by lane.
#if LANES == 16
typedef __mmask16 Mask;
static inline Floats larger(Floats x, Floats y) { return (Floats)_mm512_max_ps((__m512)x, (__m512)y); }
static inline Floats smaller(Floats x, Floats y) { return (Floats)_mm512_min_ps((__m512)x, (__m512)y); }
static inline Floats larger_magnitude(Floats x, Floats y) {
    return (Floats)_mm512_range_ps((__m512)x, (__m512)y, 0b1011);
}
static inline Floats root_of(Floats x) { return (Floats)_mm512_sqrt_ps((__m512)x); }
static inline float largest(Floats x) { return _mm512_reduce_max_ps((__m512)x); }
static inline Mask below_zero(Floats x) { return _mm512_cmp_ps_mask((__m512)x, _mm512_setzero_ps(), _CMP_LT_OQ); }
static inline Mask is_finite(Floats x) { return _mm512_knot(_mm512_fpclass_ps_mask((__m512)x, 0x99)); }
static inline bool everywhere(Mask mask) { return mask == 0xffff; }
static inline Floats select(Mask mask, Floats x, Floats y) {
    return (Floats)_mm512_mask_mov_ps((__m512)y, mask, (__m512)x);
}
static inline Ints select(Mask mask, Ints x, Ints y) {
    return (Ints)_mm512_mask_mov_epi32((__m512i)y, mask, (__m512i)x);
}
static inline Floats larger_where(Mask mask, Floats x, Floats y) {
    return (Floats)_mm512_mask_max_ps((__m512)x, mask, (__m512)x, (__m512)y);
}
static inline Floats look_up(const Table& table, Ints index) { return __builtin_shuffle(table.part[0], index); }

static inline Ints decade_of(Floats magnitude, const Map& map) {
    Ints octave = exponent(magnitude);
    Floats edge = __builtin_shuffle(load<Floats>(map.edge), load<Floats>(map.edge + LANES), octave);
    Ints below = __builtin_shuffle(load<Ints>(map.below), load<Ints>(map.below + LANES), octave);
    Mask above = _mm512_cmp_ps_mask((__m512)magnitude, (__m512)edge, _CMP_GT_OQ);
    return (Ints)_mm512_mask_add_epi32((__m512i)below, above, (__m512i)below, _mm512_set1_epi32(1));
}

static inline Ints read_codes(const uint8_t* codes) { return (Ints)_mm512_cvtepu8_epi32(load<__m128i>(codes)); }
static inline void write_unsigned(Ints code, uint8_t* to) { store(to, _mm512_cvtepi32_epi8((__m512i)code)); }
static inline void write_signed(Ints code, uint8_t* to) {
    store(to, _mm_xor_si128(_mm512_cvtsepi32_epi8((__m512i)code), _mm_set1_epi8(-128)));
}
#else
typedef Ints Mask;
static inline Floats larger(Floats x, Floats y) { return x > y ? x : y; }
static inline Floats smaller(Floats x, Floats y) { return x < y ? x : y; }
static inline Floats larger_magnitude(Floats x, Floats y) { return larger(absolute(x), absolute(y)); }
static inline float largest(Floats x) {
    float found = 0.0f;
    for (int lane = 0; lane < LANES; ++lane) found = x[lane] > found ? x[lane] : found;
    return found;
}
static inline Mask below_zero(Floats x) { return x < Floats{}; }
static inline Mask is_finite(Floats x) { return (x - x) == Floats{}; }
static inline bool everywhere(Mask mask) {
    int32_t found = -1;
    for (int lane = 0; lane < LANES; ++lane) found &= mask[lane];
    return found == -1;
}
static inline Floats select(Mask mask, Floats x, Floats y) { return mask ? x : y; }
static inline Ints select(Mask mask, Ints x, Ints y) { return mask ? x : y; }
static inline Floats larger_where(Mask mask, Floats x, Floats y) { return mask ? larger(x, y) : x; }
static inline Floats look_up(const Table& table, Ints index) {
    return __builtin_shuffle(table.part[0], table.part[1], index);
}

static inline Ints decade_of(Floats magnitude, const Map& map) {
    Ints decade = {};
    for (int i = 1; i < DECADES; ++i) decade -= magnitude > all(map.threshold[i]);
    return decade;
}

#ifdef __AVX2__
static inline Floats root_of(Floats x) { return (Floats)_mm256_sqrt_ps((__m256)x); }
static inline Ints read_codes(const uint8_t* codes) {
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)codes));
}
static inline void write_unsigned(Ints code, uint8_t* to) {
    __m256i wide = (__m256i)code;
    __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(halves, halves));
}
#else
static inline Floats root_of(Floats x) {
    for (int lane = 0; lane < LANES; ++lane) x[lane] = __builtin_sqrtf(x[lane]);
    return x;
}
static inline Ints read_codes(const uint8_t* codes) {
    Ints wide;
    for (int lane = 0; lane < LANES; ++lane) wide[lane] = codes[lane];
    return wide;
}
static inline void write_unsigned(Ints code, uint8_t* to) {
    for (int lane = 0; lane < LANES; ++lane) to[lane] = static_cast<uint8_t>(code[lane]);
}
#endif
static inline void write_signed(Ints code, uint8_t* to) {
    write_unsigned((code < -128 ? Ints{} - 128 : code) + 128, to);
}
#endif

static Table read_row(const float* row, int first) {
    float columns[COLUMNS] = {0};
    for (int i = 0; i < DECADES; ++i) columns[(first + i) % COLUMNS] = row[i];
    return load<Table>(columns);
}

// `tables`: slope, offset, gain, shift, last, threshold; `lowest`: the exponent of t + 1/2 where the value is 0.
static Map read_map(const float* tables, int lowest) {
    Map map;
    map.slope = read_row(tables, lowest);
    map.offset = read_row(tables + DECADES, lowest);
    map.gain = read_row(tables + 2 * DECADES, 0);
    map.shift = read_row(tables + 3 * DECADES, 0);
    map.last = read_row(tables + 4 * DECADES, 0);
    std::memcpy(map.threshold, tables + 5 * DECADES, sizeof map.threshold);
    for (int32_t power = 128 - OCTAVES; power < 128; ++power) {
        int32_t bits = power << 23;
        float low = load<float>(&bits), high = 2.0f * low;
        map.edge[power % OCTAVES] = 4.0f;  // more than any magnitude
        map.below[power % OCTAVES] = 0;
        for (int i = 1; i < DECADES; ++i) {
            if (map.threshold[i] < low) map.below[power % OCTAVES] = i;
            else if (map.threshold[i] < high) map.edge[power % OCTAVES] = map.threshold[i];
        }
    }
    return map;
}

// A map's values times the scale of a block.
struct Decoder {
    Table slope, offset;
    Decoder(const Map& map, float scale) : slope(map.slope), offset(map.offset) {
        for (Floats& part : slope.part) part *= scale;
        for (Floats& part : offset.part) part *= scale;
    }
};

template <bool SIGNED> static inline Floats decode(Ints code, const Decoder& decoder) {
    Floats stored = __builtin_convertvector(code, Floats), from_zero = stored - 127.0f;
    Floats middle = SIGNED ? absolute(from_zero) + 0.5f : stored + 1.5f;  // t + 1/2
    Floats value = middle * look_up(decoder.slope, exponent(middle)) + look_up(decoder.offset, exponent(middle));
    return SIGNED ? (Floats)((Ints)value | ((Ints)from_zero & INT32_MIN)) : value;
}

template <bool SIGNED> static inline void encode(Floats x, const Map& map, uint8_t* codes) {
    Floats magnitude = SIGNED ? larger_magnitude(x, all(SMALLEST)) : larger(x, all(SMALLEST));
    Ints decade = decade_of(magnitude, map);
    Floats exact = magnitude * look_up(map.gain, decade) + look_up(map.shift, decade);
    Floats t = smaller(exact, look_up(map.last, decade));
    if (!SIGNED) return write_unsigned(__builtin_convertvector(t, Ints), codes);
    Mask negative = below_zero(x);  // what is nearest to 0 keeps its sign, and -1 becomes the value above it
    Ints code = __builtin_convertvector(larger_where(negative, t, Floats{}), Ints);
    write_signed(select(negative, -2 - code, code), codes);
}

// Parameters and gradients are fp32, or bf16: the upper half of an fp32, rounded to even.
typedef uint16_t Half;
typedef Half Halves __attribute__((vector_size(2 * LANES)));

static inline Floats read(const float* from) { return load<Floats>(from); }
static inline void write(Floats x, float* to) { store(to, x); }
#if LANES == 16
static inline Floats read(const Half* from) {
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(from)), 16);
}
static inline void write(Floats x, Half* to) {
    Ints bits = (Ints)x, rounded = bits + 0x7fff + ((bits >> 16) & 1);
    Mask is_nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
    store(to, _mm512_cvtepi32_epi16((__m512i)(select(is_nan, Ints{} + 0x7fc00000, rounded) >> 16)));
}
#else
static inline Floats read(const Half* from) {
    return (Floats)(__builtin_convertvector(load<Halves>(from), Ints) << 16);
}
static inline void write(Floats x, Half* to) {
    Ints bits = (Ints)x, odd = (bits >> 16) & 1;
    Ints rounded = (bits + 0x7fff + odd) >> 16;
    Ints is_nan = x != x;
    store(to, __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), Halves));
}
#endif

template <typename T> struct Operands {
    T* param;
    const T* grad;
    uint8_t *first, *second;
    float *first_scale, *second_scale;
};

// A block's moments as floats, between the passes.
struct Room {
    float *first, *second;
};

struct Tops {
    Floats first, second;
};

template <bool ADAM, typename T> static inline void fetch(const Operands<T>& at, int64_t i) {
    __builtin_prefetch(at.param + i + AHEAD, 1);
    __builtin_prefetch(at.grad + i + AHEAD);
    if (i % 64) return;
    __builtin_prefetch(at.first + i + AHEAD, 1);
    if (ADAM) __builtin_prefetch(at.second + i + AHEAD, 1);
}

// Elements with a gradient that is not finite stay, and their moments become 0; those are looked for if CHECKED.
template <bool ADAM, bool CHECKED, typename T>
static inline void update(const Operands<T>& at, int64_t i, Room room, const Decoder& first, const Decoder& second,
                          const Settings& s, Tops& tops) {
    fetch<ADAM>(at, i);
    Floats param = read(at.param + i), grad = read(at.grad + i) * s.sign, moved;
    Mask finite = is_finite(grad);
    if (CHECKED) grad = select(finite, grad, Floats{});
    Floats m = decode<true>(read_codes(at.first + i), first);
    if (ADAM) {
        m = m + s.fresh1 * grad;
        Floats v = decode<false>(read_codes(at.second + i), second) + s.fresh2 * (grad * grad);
        moved = param * s.decay - s.step_size * (m / (root_of(v) * s.root + s.eps));
        if (CHECKED) v = select(finite, v, Floats{});
        store(room.second + i, v);
        tops.second = larger(v, tops.second);
    } else {
        m = m + grad + s.decay * param;
        moved = param - s.step_size * m;
    }
    if (CHECKED) m = select(finite, m, Floats{});
    store(room.first + i, m);
    tops.first = larger_magnitude(m, tops.first);
    write(CHECKED ? select(finite, moved, param) : moved, at.param + i);
}

template <typename T> static inline bool all_finite(const T* values, int64_t length) {
    Floats even = {}, odd = {};  // sums of zeros, or NaN: two, for each waits on itself
    int64_t i = 0;
    for (; i + 2 * LANES <= length; i += 2 * LANES) {
        even += read(values + i) * 0.0f;
        odd += read(values + i + LANES) * 0.0f;
    }
    if (i < length) even += read(values + i) * 0.0f;
    return everywhere(is_finite(even + odd));
}

template <bool SIGNED>
static inline void encode_block(float top, float* scale, const float* wide, uint8_t* codes, int64_t length,
                                const Map& map) {
    float down = 1.0f / (top > 1e-38f ? top : 1e-38f);
    for (int64_t i = 0; i < length; i += LANES) encode<SIGNED>(load<Floats>(wide + i) * down, map, codes + i);
    *scale = top;
}

// A block whose length is a multiple of LANES.
template <bool ADAM, typename T>
__attribute__((always_inline)) static inline void whole_block(const Operands<T>& at, int64_t length, Room room,
                                                              const Map& first, const Map& second, const Settings& s) {
    Decoder decoder1(first, *at.first_scale * s.beta1), decoder2(second, ADAM ? *at.second_scale * s.beta2 : 0.0f);
    Tops tops = {};
    if (all_finite(at.grad, length)) {
        for (int64_t i = 0; i < length; i += LANES) update<ADAM, false>(at, i, room, decoder1, decoder2, s, tops);
    } else {
        for (int64_t i = 0; i < length; i += LANES) update<ADAM, true>(at, i, room, decoder1, decoder2, s, tops);
    }
    encode_block<true>(largest(tops.first), at.first_scale, room.first, at.first, length, first);
    if (ADAM) encode_block<false>(largest(tops.second), at.second_scale, room.second, at.second, length, second);
}

// A block of any length, through copies padded with zeros: the signed map's zero is code 127.
template <bool ADAM, typename T>
static void short_block(const Operands<T>& at, int64_t length, Room room, const Map& first, const Map& second,
                        const Settings& settings) {
    int64_t padded = (length + LANES - 1) / LANES * LANES;
    std::vector<T> param(padded), grad(padded);
    std::vector<uint8_t> first_codes(padded, 127), second_codes(padded);
    std::memcpy(param.data(), at.param, length * sizeof(T));
    std::memcpy(grad.data(), at.grad, length * sizeof(T));
    std::memcpy(first_codes.data(), at.first, length);
    if (ADAM) std::memcpy(second_codes.data(), at.second, length);
    Operands<T> copy = {param.data(),        grad.data(),    first_codes.data(),
                     second_codes.data(), at.first_scale, at.second_scale};
    whole_block<ADAM>(copy, padded, room, first, second, settings);
    std::memcpy(at.param, param.data(), length * sizeof(T));
    std::memcpy(at.first, first_codes.data(), length);
    if (ADAM) std::memcpy(at.second, second_codes.data(), length);
}

template <bool ADAM, typename T>
static void some_blocks(int64_t begin, int64_t end, int64_t num_elements, int64_t block_size, const Operands<T>& whole,
                        const float* tables, const Settings settings) {
    const Map signed_map = read_map(tables, 126), unsigned_map = read_map(tables + 6 * DECADES, 127);
    std::vector<float> space(2 * (block_size + LANES));
    Room room = {space.data(), space.data() + block_size + LANES};
    for (int64_t block = begin; block < end; ++block) {
        int64_t start = block * block_size;
        int64_t length = num_elements - start < block_size ? num_elements - start : block_size;
        Operands<T> at = {whole.param + start, whole.grad + start, whole.first + start, whole.second + ADAM * start,
                       whole.first_scale + block, whole.second_scale + ADAM * block};
        if (length % LANES) short_block<ADAM>(at, length, room, signed_map, unsigned_map, settings);
        else whole_block<ADAM>(at, length, room, signed_map, unsigned_map, settings);
    }
}

template <bool ADAM, typename T>
static void all_blocks(int64_t num_threads, int64_t num_elements, int64_t block_size, const Operands<T>& whole,
                       const float* tables, const Settings& settings) {
    int64_t num_blocks = (num_elements + block_size - 1) / block_size;
#pragma omp parallel num_threads(num_threads)
    {
        int64_t part = omp_get_thread_num(), num_parts = omp_get_num_threads();
        int64_t begin = num_blocks * part / num_parts, end = num_blocks * (part + 1) / num_parts;
        some_blocks<ADAM>(begin, end, num_elements, block_size, whole, tables, settings);
    }
}

template <bool ADAM, typename T>
static void blocks(int64_t num_threads, int64_t num_elements, int64_t block_size, void* param, const void* grad,
                   uint8_t* first, float* first_scales, uint8_t* second, float* second_scales, const float* tables,
                   const Settings& settings) {
    Operands<T> whole = {(T*)param, (const T*)grad, first, second, first_scales, second_scales};
    all_blocks<ADAM>(num_threads, num_elements, block_size, whole, tables, settings);
}

extern "C" void adam_blocks(int64_t num_threads, int64_t num_elements, int64_t block_size, int64_t narrow, void* param,
                            const void* grad, uint8_t* first, float* first_scales, uint8_t* second,
                            float* second_scales, const float* tables, const Settings* settings) {
    (narrow ? blocks<true, Half> : blocks<true, float>)(num_threads, num_elements, block_size, param, grad, first,
                                                        first_scales, second, second_scales, tables, *settings);
}

extern "C" void momentum_blocks(int64_t num_threads, int64_t num_elements, int64_t block_size, int64_t narrow,
                                void* param, const void* grad, uint8_t* first, float* first_scales,
                                const float* tables, const Settings* settings) {
    (narrow ? blocks<false, Half> : blocks<false, float>)(num_threads, num_elements, block_size, param, grad, first,
                                                          first_scales, first, first_scales, tables, *settings);
}

// The same update of a parameter that is too small for codes: its moments are fp32.
static inline float widened(float value) { return value; }
static inline float widened(Half value) {
    uint32_t bits = (uint32_t)value << 16;
    return load<float>(&bits);
}
static inline void narrow_to(float value, float* to) { *to = value; }
static inline void narrow_to(float value, Half* to) {
    uint32_t bits = load<uint32_t>(&value);
    *to = value != value ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

template <bool ADAM, typename T>
static void wide(int64_t num_threads, int64_t num_elements, T* params, const T* grads, float* first, float* second,
                 const Settings& s) {
#pragma omp parallel for simd num_threads(num_threads)
    for (int64_t i = 0; i < num_elements; ++i) {
        float param = widened(params[i]), given = widened(grads[i]) * s.sign, moved;
        bool finite = (given - given) == 0.0f;
        float grad = finite ? given : 0.0f, m, v = 0.0f;
        if (ADAM) {
            m = s.beta1 * first[i] + s.fresh1 * grad;
            v = s.beta2 * second[i] + s.fresh2 * (grad * grad);
            moved = param * s.decay - s.step_size * (m / (__builtin_sqrtf(v) * s.root + s.eps));
            second[i] = finite ? v : 0.0f;
        } else {
            m = s.beta1 * first[i] + grad + s.decay * param;
            moved = param - s.step_size * m;
        }
        first[i] = finite ? m : 0.0f;
        narrow_to(finite ? moved : param, params + i);
    }
}

extern "C" void adam_wide(int64_t num_threads, int64_t num_elements, int64_t narrow, void* param, const void* grad,
                          float* first, float* second, const Settings* settings) {
    if (narrow) wide<true>(num_threads, num_elements, (Half*)param, (const Half*)grad, first, second, *settings);
    else wide<true>(num_threads, num_elements, (float*)param, (const float*)grad, first, second, *settings);
}

extern "C" void momentum_wide(int64_t num_threads, int64_t num_elements, int64_t narrow, void* param, const void* grad,
                              float* first, const Settings* settings) {
    if (narrow) wide<false>(num_threads, num_elements, (Half*)param, (const Half*)grad, first, first, *settings);
    else wide<false>(num_threads, num_elements, (float*)param, (const float*)grad, first, first, *settings);
}
