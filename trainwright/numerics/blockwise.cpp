// One pass over a parameter whose moments are 8-bit codes: decode, update, encode, block by block.
//
// A code is t - 1 of the unsigned map (quantise.py), and 127 ± t of the signed one. The decade of 2^k intervals has the
// t from 2^k to 2^(k+1) - 1: the k bits after the leading one are those of a position in [1, 2) along the decade.
//     z = |value| * gain[decade] + 32/9 in [4, 8),    t = the low byte of (bits of z >> count),    count = 23 - k
// since the exponent's bits are 129 * 2^k there, 2^k in a byte. The value 1 is a decade of its own, whose gain of minus
// infinity leaves 256 or 128; where t is 0, 1 or 2 all the same, a count of 31 - t gives it whatever z is.

#include <cstdint>
#include <cstring>
#include <omp.h>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__)
#define LANES 16
#else
#define LANES 8
#endif

#if LANES == 16 && defined(__AVX512VBMI__)
#define BYTEWISE  // bytes are looked up 64 at a time
#define GROUP 64
#else
#define GROUP LANES
#endif
#define PARTS (GROUP / LANES)

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

static const int CODES = 256;
static const int THRESHOLDS = 8;
static const int COLUMNS = 16;
static const int OCTAVES = 32;
static const float SMALLEST = 5e-10f;  // 0 in both maps, as all below it, and within 32 octaves of 1
static const float FIRST = 32.0f / 9;  // where the line of any decade is at 0
static const float LAST = 0x1.fffffep2f;  // the float before 8
static const int64_t AHEAD = 1024;        // elements between what is fetched and what is worked on

extern "C" struct Settings {
    float decay, beta1, fresh1, beta2, fresh2, step_size, root, eps;  // fresh: 1 - beta, rounded once
    float sign;  // of the gradient: -1 where it is climbed
};

// As it comes from fused_8bit.py, one for signed values and one for others.
struct Tables {
    float values[CODES];
    uint8_t planes[4][CODES];
    float gain[COLUMNS];          // by the count's last four bits
    float threshold[COLUMNS];  // above it, a magnitude is at least of that decade
    int32_t count[COLUMNS];       // by decade
    int32_t borrow[OCTAVES];      // by the last five bits of a magnitude's exponent: (borrow - bits) >> 23 is the count
};

template <typename T> static inline T load(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

template <typename T> static inline void store(void* to, T value) { std::memcpy(to, &value, sizeof(T)); }

static inline Floats all(float value) { return value - Floats{}; }
static inline Floats absolute(Floats x) { return (Floats)((Ints)x & 0x7fffffff); }

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
#ifdef __AVX2__
static inline Floats root_of(Floats x) { return (Floats)_mm256_sqrt_ps((__m256)x); }
#else
static inline Floats root_of(Floats x) {
    for (int lane = 0; lane < LANES; ++lane) x[lane] = __builtin_sqrtf(x[lane]);
    return x;
}
#endif
#endif

// How to get at the tables' entries: sixteen columns in one register or two.
struct Row {
    Floats part[COLUMNS / LANES];
    Row(const void* columns) { std::memcpy(part, columns, sizeof part); }
};

#if LANES == 16
static inline Floats look_up(const Row& row, Ints index) { return __builtin_shuffle(row.part[0], index); }

// One threshold at most lies in an octave: subtracting a magnitude's bits borrows from the exponent above it.
struct Counter {
    Ints low, high;
    Counter(const Tables& tables) : low(load<Ints>(tables.borrow)), high(load<Ints>(tables.borrow + LANES)) {}
    Ints operator()(Floats magnitude) const {
        Ints octave = (Ints)((Words)magnitude >> 23);
        return (Ints)((Words)(__builtin_shuffle(low, high, octave) - (Ints)magnitude) >> 23);
    }
};
#else
static inline Floats look_up(const Row& row, Ints index) { return __builtin_shuffle(row.part[0], row.part[1], index); }

struct Counter {
    const float* threshold;
    Row count;
    Counter(const Tables& tables) : threshold(tables.threshold), count(tables.count) {}
    Ints operator()(Floats magnitude) const {
        Ints decade = {};
        for (int i = 0; i < THRESHOLDS; ++i) decade -= magnitude > all(threshold[i]);
        return (Ints)look_up(count, decade);
    }
};
#endif

struct Values {
    Floats part[PARTS];
};

#ifdef BYTEWISE
// The values' bytes, each of the four looked up by itself; codes are 64, of which 128 values fit two registers.
struct Book {
    const __m512i (*bytes)[4];
    Book(const Tables& tables) : bytes((const __m512i(*)[4])tables.planes) {}
    __m512i look_up(int byte, __m512i codes) const {
        const __m512i* quarter = bytes[byte];
        __m512i low = _mm512_permutex2var_epi8(quarter[0], codes, quarter[1]);
        __m512i high = _mm512_permutex2var_epi8(quarter[2], codes, quarter[3]);
        return _mm512_mask_mov_epi8(low, _mm512_movepi8_mask(codes), high);
    }
    Values operator()(const uint8_t* from) const {
        const __m512i turned = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        __m512i codes = _mm512_permutexvar_epi32(turned, load<__m512i>(from));
        __m512i byte0 = look_up(0, codes), byte1 = look_up(1, codes);
        __m512i byte2 = look_up(2, codes), byte3 = look_up(3, codes);
        __m512i low01 = _mm512_unpacklo_epi8(byte0, byte1), low23 = _mm512_unpacklo_epi8(byte2, byte3);
        __m512i high01 = _mm512_unpackhi_epi8(byte0, byte1), high23 = _mm512_unpackhi_epi8(byte2, byte3);
        return {{(Floats)_mm512_unpacklo_epi16(low01, low23), (Floats)_mm512_unpackhi_epi16(low01, low23),
                 (Floats)_mm512_unpacklo_epi16(high01, high23), (Floats)_mm512_unpackhi_epi16(high01, high23)}};
    }
};
#else
struct Book {
    const float* values;
    Book(const Tables& tables) : values(tables.values) {}
    Values operator()(const uint8_t* codes) const {
        Values found;
        for (int lane = 0; lane < LANES; ++lane) found.part[0][lane] = values[codes[lane]];
        return found;
    }
};
#endif

struct Map {
    Book book;
    Counter count;
    Row gain;
    Map(const Tables& tables) : book(tables), count(tables), gain(tables.gain) {}
};

// t in the lowest byte; the others hold anything.
template <bool SIGNED> static inline Ints place(Floats x, const Map& map) {
    Floats magnitude = SIGNED ? larger_magnitude(x, all(SMALLEST)) : larger(x, all(SMALLEST));
    Ints count = map.count(magnitude);
    Floats z = smaller(magnitude * look_up(map.gain, count) + FIRST, all(LAST));
    return (Ints)((Words)z >> (Words)count);
}

// What is nearest to 0 keeps its sign, and -1 becomes the value above it.
#ifdef BYTEWISE
static inline __m512i low_bytes(const Ints t[PARTS]) {
    uint8_t order[GROUP];
    for (int i = 0; i < GROUP; ++i) order[i] = 4 * (i % 32);  // from 64 on, those of the second operand
    __m512i first = _mm512_permutex2var_epi8((__m512i)t[0], load<__m512i>(order), (__m512i)t[1]);
    __m512i second = _mm512_permutex2var_epi8((__m512i)t[2], load<__m512i>(order), (__m512i)t[3]);
    return _mm512_mask_mov_epi64(first, 0xf0, second);
}

template <bool SIGNED>
static inline void encode(const float* wide, float down, const Map& map, uint8_t* codes) {
    Ints t[PARTS];
    uint64_t negative = 0;
    for (int part = 0; part < PARTS; ++part) {
        Floats x = load<Floats>(wide + LANES * part) * down;
        t[part] = place<SIGNED>(x, map);
        if (SIGNED) negative |= (uint64_t)below_zero(x) << (LANES * part);
    }
    __m512i found = low_bytes(t), middle = _mm512_set1_epi8(127), one = _mm512_set1_epi8(1);
    if (!SIGNED) return store(codes, _mm512_sub_epi8(found, one));
    __m512i inner = _mm512_min_epu8(_mm512_max_epu8(found, one), middle);
    store(codes, _mm512_mask_sub_epi8(_mm512_add_epi8(middle, found), negative, middle, inner));
}
#else
#if LANES == 16
static inline void write_codes(Ints code, uint8_t* to) { store(to, _mm512_cvtepi32_epi8((__m512i)code)); }
#elif defined(__AVX2__)
static inline void write_codes(Ints code, uint8_t* to) {
    __m256i wide = (__m256i)code;
    __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(halves, halves));
}
#else
static inline void write_codes(Ints code, uint8_t* to) {
    for (int lane = 0; lane < LANES; ++lane) to[lane] = static_cast<uint8_t>(code[lane]);
}
#endif

template <bool SIGNED>
static inline void encode(const float* wide, float down, const Map& map, uint8_t* codes) {
    Floats x = load<Floats>(wide) * down;
    Ints t = place<SIGNED>(x, map) & 255, inner = t < 1 ? Ints{} + 1 : t > 127 ? Ints{} + 127 : t;
    write_codes(SIGNED ? select(below_zero(x), 127 - inner, 127 + t) : (t - 1) & 255, codes);
}
#endif

// Parameters and gradients are fp32, or bf16: the upper half of an fp32, rounded to even.
typedef uint16_t Half;
typedef Half Halves __attribute__((vector_size(2 * LANES)));

static inline Floats read(const float* from) { return load<Floats>(from); }
static inline void write(Floats x, float* to) { store(to, x); }
#if LANES == 16  // GCC widens what it converts in halves
static inline Ints widened(const Half* from) { return (Ints)_mm512_cvtepu16_epi32(load<__m256i>(from)); }
#else
static inline Ints widened(const Half* from) { return __builtin_convertvector(load<Halves>(from), Ints); }
#endif
static inline Floats read(const Half* from) { return (Floats)(widened(from) << 16); }
#if LANES == 16 && defined(__AVX512BF16__)  // subnormal numbers become 0
static inline void write(Floats x, Half* to) { store(to, _mm512_cvtneps_pbh((__m512)x)); }
#else
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
    for (int64_t ahead = i + AHEAD; ahead < i + AHEAD + GROUP; ahead += 64 / (int64_t)sizeof(T)) {
        __builtin_prefetch(at.param + ahead, 1);
        __builtin_prefetch(at.grad + ahead);
    }
    if (i % 64) return;
    __builtin_prefetch(at.first + i + AHEAD, 1);
    if (ADAM) __builtin_prefetch(at.second + i + AHEAD, 1);
}


// Elements with a gradient that is not finite stay, and their moments become 0; those are looked for if CHECKED.
// `m` and `v`: as the last step left them, without their scales. All roots are begun before the first is waited for.
template <bool CHECKED, typename T>
static inline void adam(T* param, const T* from, Values m, Values v, float* room1, float* room2, float scale1,
                        float scale2, const Settings& s, Tops& tops) {
    Floats grad[PARTS], quotient[PARTS];
    Mask finite[PARTS];
    for (int i = 0; i < PARTS; ++i) {
        grad[i] = read(from + LANES * i);
        if (CHECKED) finite[i] = is_finite(grad[i]), grad[i] = select(finite[i], grad[i], Floats{});
    }
    for (int i = 0; i < PARTS; ++i) {
        v.part[i] = v.part[i] * scale2 + s.fresh2 * (grad[i] * grad[i]);
        if (CHECKED) v.part[i] = select(finite[i], v.part[i], Floats{});
        quotient[i] = root_of(v.part[i]);
        store(room2 + LANES * i, v.part[i]);
        tops.second = larger(v.part[i], tops.second);
    }
    for (int i = 0; i < PARTS; ++i) m.part[i] = m.part[i] * scale1 + (s.sign * s.fresh1) * grad[i];
    for (int i = 0; i < PARTS; ++i) quotient[i] = m.part[i] / (quotient[i] * s.root + s.eps);
    for (int i = 0; i < PARTS; ++i) {
        if (CHECKED) m.part[i] = select(finite[i], m.part[i], Floats{});
        store(room1 + LANES * i, m.part[i]);
        tops.first = larger_magnitude(m.part[i], tops.first);
    }
    for (int i = 0; i < PARTS; ++i) {
        Floats before = read(param + LANES * i), after = before * s.decay - s.step_size * quotient[i];
        write(CHECKED ? select(finite[i], after, before) : after, param + LANES * i);
    }
}

template <bool CHECKED, typename T>
static inline void momentum(T* param, const T* from, Values m, float* room, float scale, const Settings& s,
                            Tops& tops) {
    for (int i = 0; i < PARTS; ++i) {
        Floats before = read(param + LANES * i), grad = read(from + LANES * i);
        Mask finite = is_finite(grad);
        if (CHECKED) grad = select(finite, grad, Floats{});
        Floats sum = m.part[i] * scale + s.sign * grad + s.decay * before, after = before - s.step_size * sum;
        if (CHECKED) sum = select(finite, sum, Floats{});
        store(room + LANES * i, sum);
        tops.first = larger_magnitude(sum, tops.first);
        write(CHECKED ? select(finite, after, before) : after, param + LANES * i);
    }
}

template <bool ADAM, bool CHECKED, typename T>
static inline Tops update_block(const Operands<T>& at, int64_t length, Room room, const Map& first, const Map& second,
                                const Settings& s) {
    Tops tops = {};
    float scale1 = *at.first_scale * s.beta1, scale2 = ADAM ? *at.second_scale * s.beta2 : 0.0f;
    for (int64_t i = 0; i < length; i += GROUP) {
        fetch<ADAM>(at, i);
        Values m = first.book(at.first + i), v = {};
        if (ADAM) v = second.book(at.second + i);
        if (ADAM)
            adam<CHECKED>(at.param + i, at.grad + i, m, v, room.first + i, room.second + i, scale1, scale2, s, tops);
        else
            momentum<CHECKED>(at.param + i, at.grad + i, m, room.first + i, scale1, s, tops);
    }
    return tops;
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
    for (int64_t i = 0; i < length; i += GROUP) encode<SIGNED>(wide + i, down, map, codes + i);
    *scale = top;
}

// A block whose length is a multiple of GROUP.
template <bool ADAM, typename T>
__attribute__((always_inline)) static inline void whole_block(const Operands<T>& at, int64_t length, Room room,
                                                              const Map& first, const Map& second, const Settings& s) {
    Tops tops = all_finite(at.grad, length) ? update_block<ADAM, false>(at, length, room, first, second, s)
                                            : update_block<ADAM, true>(at, length, room, first, second, s);
    encode_block<true>(largest(tops.first), at.first_scale, room.first, at.first, length, first);
    if (ADAM) encode_block<false>(largest(tops.second), at.second_scale, room.second, at.second, length, second);
}

// A block of any length, through copies padded with zeros: the signed map's zero is code 127.
template <typename T> struct Copies {
    std::vector<T> param, grad;
    std::vector<uint8_t> first, second;
    Copies(int64_t size) : param(size), grad(size), first(size), second(size) {}
};

template <bool ADAM, typename T>
static void short_block(const Operands<T>& at, int64_t length, Room room, Copies<T>& copies, const Map& first,
                        const Map& second, const Settings& settings) {
    int64_t padded = (length + GROUP - 1) / GROUP * GROUP, rest = padded - length;
    std::memcpy(copies.param.data(), at.param, length * sizeof(T));
    std::memcpy(copies.grad.data(), at.grad, length * sizeof(T));
    std::memcpy(copies.first.data(), at.first, length);
    if (ADAM) std::memcpy(copies.second.data(), at.second, length);
    std::memset(copies.param.data() + length, 0, rest * sizeof(T));
    std::memset(copies.grad.data() + length, 0, rest * sizeof(T));
    std::memset(copies.first.data() + length, 127, rest);
    std::memset(copies.second.data() + length, 0, rest);
    Operands<T> copy = {copies.param.data(),  copies.grad.data(), copies.first.data(),
                        copies.second.data(), at.first_scale,     at.second_scale};
    whole_block<ADAM>(copy, padded, room, first, second, settings);
    std::memcpy(at.param, copies.param.data(), length * sizeof(T));
    std::memcpy(at.first, copies.first.data(), length);
    if (ADAM) std::memcpy(at.second, copies.second.data(), length);
}

template <bool ADAM, typename T>
static void some_blocks(int64_t begin, int64_t end, int64_t num_elements, int64_t block_size, const Operands<T>& whole,
                        const Tables* tables, const Settings settings) {
    const Map signed_map(tables[0]), unsigned_map(tables[1]);
    Copies<T> copies(block_size + GROUP);
    std::vector<float> space(2 * (block_size + GROUP));
    Room room = {space.data(), space.data() + block_size + GROUP};
    for (int64_t block = begin; block < end; ++block) {
        int64_t start = block * block_size;
        int64_t length = num_elements - start < block_size ? num_elements - start : block_size;
        Operands<T> at = {whole.param + start, whole.grad + start, whole.first + start, whole.second + ADAM * start,
                       whole.first_scale + block, whole.second_scale + ADAM * block};
        if (length % GROUP) short_block<ADAM>(at, length, room, copies, signed_map, unsigned_map, settings);
        else whole_block<ADAM>(at, length, room, signed_map, unsigned_map, settings);
    }
}

template <bool ADAM, typename T>
static void all_blocks(int64_t num_threads, int64_t num_elements, int64_t block_size, const Operands<T>& whole,
                       const Tables* tables, const Settings& settings) {
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
                   uint8_t* first, float* first_scales, uint8_t* second, float* second_scales, const Tables* tables,
                   const Settings& settings) {
    Operands<T> whole = {(T*)param, (const T*)grad, first, second, first_scales, second_scales};
    all_blocks<ADAM>(num_threads, num_elements, block_size, whole, tables, settings);
}

extern "C" void adam_blocks(int64_t num_threads, int64_t num_elements, int64_t block_size, int64_t narrow, void* param,
                            const void* grad, uint8_t* first, float* first_scales, uint8_t* second,
                            float* second_scales, const Tables* tables, const Settings* settings) {
    (narrow ? blocks<true, Half> : blocks<true, float>)(num_threads, num_elements, block_size, param, grad, first,
                                                        first_scales, second, second_scales, tables, *settings);
}

extern "C" void momentum_blocks(int64_t num_threads, int64_t num_elements, int64_t block_size, int64_t narrow,
                                void* param, const void* grad, uint8_t* first, float* first_scales,
                                const Tables* tables, const Settings* settings) {
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
