// One pass over a parameter that has moments for a part of it alone: Adam or momentum in the part, the gradient's sign,
// the gradient itself or nothing outside it.
//
//     part       m ← β1 m + (1 - β1) g,  v ← β2 v + (1 - β2) g²,  θ ← decay θ - step m first / (√v root + ε)
//     outside    θ ← decay θ - rest sign(g)
//
// What is in the part is computed before the row is passed over, and written after that, while the row is in the cache.

#include <cstdint>
#include <omp.h>
#include <vector>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define HAS_EXPAND 1
#endif

typedef uint16_t Half;  // bf16: the upper half of an fp32, rounded to even

enum Rule { NONE, GRADIENT, SIGN };

extern "C" struct SubspaceSettings {
    float decay, beta1, fresh1, beta2, fresh2, step_size, first, root, eps, rest, sign;
    int32_t rule, adam;
};

static const int64_t CHUNK = 1 << 14;

static inline float read(float value) { return value; }
static inline float read(Half value) { return __builtin_bit_cast(float, (uint32_t)value << 16); }
static inline void write(float value, float* to) { *to = value; }
static inline void write(float value, Half* to) {
    uint32_t bits = __builtin_bit_cast(uint32_t, value);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    *to = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}

template <bool ADAM> static inline float moved(float param, float grad, float* m, float* v, const SubspaceSettings& s) {
    *m = s.beta1 * *m + s.fresh1 * grad;
    if (!ADAM) return param * s.decay - s.step_size * *m;
    *v = s.beta2 * *v + s.fresh2 * (grad * grad);
    return param * s.decay - s.step_size * (*m * s.first / (__builtin_sqrtf(*v) * s.root + s.eps));
}

template <int RULE> static inline float outside(float param, float grad, const SubspaceSettings& s) {
    float step = RULE == SIGN ? (float)((grad > 0.0f) - (grad < 0.0f)) : RULE == GRADIENT ? grad : 0.0f;
    return param * s.decay - s.rest * step;
}

template <typename T, int RULE>
static inline void pass(int64_t length, T* param, const T* grad, const SubspaceSettings& s) {
#pragma omp simd
    for (int64_t i = 0; i < length; ++i) write(outside<RULE>(read(param[i]), read(grad[i]) * s.sign, s), param + i);
}

template <typename T> static inline void pass_by_rule(int64_t length, T* param, const T* grad, const SubspaceSettings& s) {
    if (s.rule == SIGN) pass<T, SIGN>(length, param, grad, s);
    else if (s.rule == GRADIENT) pass<T, GRADIENT>(length, param, grad, s);
    else pass<T, NONE>(length, param, grad, s);
}

template <typename T, bool ADAM>
static inline void whole(int64_t length, T* param, const T* grad, float* m, float* v, const SubspaceSettings& s) {
#pragma omp simd
    for (int64_t i = 0; i < length; ++i)
        write(moved<ADAM>(read(param[i]), read(grad[i]) * s.sign, m + i, ADAM ? v + i : v, s), param + i);
}

template <typename T, bool ADAM>
static inline void gather(int64_t length, const int32_t* index, const T* param, const T* grad, float* m, float* v,
                          float* found, const SubspaceSettings& s) {
    for (int64_t i = 0; i < length; ++i) {
        int64_t at = index[i];
        found[i] = moved<ADAM>(read(param[at]), read(grad[at]) * s.sign, m + i, ADAM ? v + i : v, s);
    }
}

[[maybe_unused]] static bool is_ascending(int64_t kept, const int32_t* index) {
    for (int64_t i = 1; i < kept; ++i)
        if (index[i] <= index[i - 1]) return false;
    return true;
}

#ifdef HAS_EXPAND
static const int64_t LANES = 16;

static inline __m512 read_some(__mmask16 lanes, const float* from) { return _mm512_maskz_loadu_ps(lanes, from); }
static inline __m512 read_some(__mmask16 lanes, const Half* from) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from)), 16);
}
static inline void write_some(__mmask16 lanes, __m512 x, float* to) { _mm512_mask_storeu_ps(to, lanes, x); }
static inline void write_some(__mmask16 lanes, __m512 x, Half* to) {
    __m512i bits = (__m512i)x, odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
    __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000));
    _mm256_mask_storeu_epi16(to, lanes, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

// Sixteen columns, some of which have moments: those are the next of the row's, spread to where their columns are.
struct Sixteen {
    __mmask16 there, inside;
    int64_t before;  // the row's moments ahead of these
};

static std::vector<Sixteen> sixteens(int64_t width, int64_t kept, const int32_t* index) {
    std::vector<Sixteen> found;
    int64_t next = 0;
    for (int64_t begin = 0; begin < width; begin += LANES) {
        int64_t length = width - begin < LANES ? width - begin : LANES, before = next;
        uint32_t inside = 0;
        for (; next < kept && index[next] < begin + length; ++next) inside |= 1u << (index[next] - begin);
        found.push_back({(__mmask16)((1u << length) - 1), (__mmask16)inside, before});
    }
    return found;
}

template <int RULE> static inline __m512 outside(__m512 param, __m512 grad, const SubspaceSettings& s) {
    __m512 step = grad;
    if (RULE == SIGN) {
        __m512i sign = _mm512_and_si512((__m512i)grad, _mm512_set1_epi32(INT32_MIN));
        __mmask16 is_some = _mm512_cmp_ps_mask(grad, _mm512_setzero_ps(), _CMP_NEQ_OQ);
        step = (__m512)_mm512_maskz_or_epi32(is_some, sign, (__m512i)_mm512_set1_ps(1.0f));
    }
    if (RULE == NONE) return param * s.decay;
    return param * s.decay - s.rest * step;
}

// The gradients with moments side by side, then their directions in place of them, then the row.
template <typename T, bool ADAM, int RULE>
static inline void row_by_sixteens(const std::vector<Sixteen>& parts, int64_t kept, T* param, const T* grad, float* m,
                                   float* v, float* found, const SubspaceSettings& s) {
    for (size_t i = 0; i < parts.size(); ++i) {
        __m512 given = read_some(parts[i].there, grad + i * LANES) * s.sign;
        _mm512_storeu_ps(found + parts[i].before, _mm512_maskz_compress_ps(parts[i].inside, given));
    }
#pragma omp simd
    for (int64_t i = 0; i < kept; ++i) found[i] = moved<ADAM>(0.0f, found[i], m + i, ADAM ? v + i : v, s);
    for (size_t i = 0; i < parts.size(); ++i, param += LANES, grad += LANES) {
        __m512 own = read_some(parts[i].there, param), given = read_some(parts[i].there, grad) * s.sign;
        __m512 step = _mm512_maskz_expand_ps(parts[i].inside, _mm512_loadu_ps(found + parts[i].before));
        __m512 inside = own * s.decay + step;
        write_some(parts[i].there, _mm512_mask_mov_ps(outside<RULE>(own, given, s), parts[i].inside, inside), param);
    }
}

template <typename T, bool ADAM>
static void sorted_columns(int64_t num_threads, int64_t rows, int64_t width, int64_t kept, const int32_t* index, T* param,
                           const T* grad, float* m, float* v, const SubspaceSettings& s) {
    const std::vector<Sixteen> parts = sixteens(width, kept, index);
    auto step = s.rule == SIGN       ? row_by_sixteens<T, ADAM, SIGN>
                : s.rule == GRADIENT ? row_by_sixteens<T, ADAM, GRADIENT>
                                     : row_by_sixteens<T, ADAM, NONE>;
#pragma omp parallel num_threads(num_threads)
    {
        std::vector<float> found(kept + LANES);  // a whole vector is stored wherever one begins
#pragma omp for
        for (int64_t row = 0; row < rows; ++row) {
            float* second = ADAM ? v + row * kept : v;
            step(parts, kept, param + row * width, grad + row * width, m + row * kept, second, found.data(), s);
        }
    }
}
#endif

// The same `kept` columns of each row.
template <typename T, bool ADAM>
static void columns(int64_t num_threads, int64_t rows, int64_t width, int64_t kept, const int32_t* index, T* param,
                    const T* grad, float* m, float* v, const SubspaceSettings& s) {
#ifdef HAS_EXPAND
    if (is_ascending(kept, index)) {
        return sorted_columns<T, ADAM>(num_threads, rows, width, kept, index, param, grad, m, v, s);
    }
#endif
#pragma omp parallel num_threads(num_threads)
    {
        std::vector<float> found(kept);
#pragma omp for
        for (int64_t row = 0; row < rows; ++row) {
            T* own = param + row * width;
            float* second = ADAM ? v + row * kept : v;
            gather<T, ADAM>(kept, index, own, grad + row * width, m + row * kept, second, found.data(), s);
            pass_by_rule(width, own, grad + row * width, s);
            for (int64_t i = 0; i < kept; ++i) write(found[i], own + index[i]);
        }
    }
}

// Whole rows: row r has its moments in row slot[r] of theirs, or none where that is below 0.
template <typename T, bool ADAM>
static void rows_of(int64_t num_threads, int64_t rows, int64_t width, const int32_t* slot, T* param, const T* grad,
                    float* m, float* v, const SubspaceSettings& s) {
    int64_t chunks = (width + CHUNK - 1) / CHUNK;
#pragma omp parallel for num_threads(num_threads)
    for (int64_t piece = 0; piece < rows * chunks; ++piece) {
        int64_t row = piece / chunks, begin = piece % chunks * CHUNK;
        int64_t length = width - begin < CHUNK ? width - begin : CHUNK, at = row * width + begin;
        if (slot[row] < 0) {
            pass_by_rule(length, param + at, grad + at, s);
            continue;
        }
        int64_t kept = slot[row] * width + begin;
        whole<T, ADAM>(length, param + at, grad + at, m + kept, ADAM ? v + kept : v, s);
    }
}

// Single elements: these two passes are the only form.
template <typename T, bool ADAM>
static void entries(int64_t num_elements, int64_t kept, const int32_t* index, T* param, const T* grad, float* m,
                    float* v, const SubspaceSettings& s) {
    std::vector<float> found(kept);
    gather<T, ADAM>(kept, index, param, grad, m, v, found.data(), s);
    pass_by_rule(num_elements, param, grad, s);
    for (int64_t i = 0; i < kept; ++i) write(found[i], param + index[i]);
}

template <typename T, bool ADAM>
static void step(int64_t num_threads, int64_t side, int64_t rows, int64_t width, int64_t kept, const int32_t* index,
                 T* param, const T* grad, float* m, float* v, const SubspaceSettings& s) {
    if (side == 1) columns<T, ADAM>(num_threads, rows, width, kept, index, param, grad, m, v, s);
    else if (side == 0) rows_of<T, ADAM>(num_threads, rows, width, index, param, grad, m, v, s);
    else entries<T, ADAM>(rows * width, kept, index, param, grad, m, v, s);
}

// side: 1 columns, 0 rows (`index` then holds slots), 2 single elements.
extern "C" void subspace_step(int64_t num_threads, int64_t narrow, int64_t side, int64_t rows, int64_t width,
                              int64_t kept, const int32_t* index, void* param, const void* grad, float* m, float* v,
                              const SubspaceSettings* s) {
    if (narrow) {
        (s->adam ? step<Half, true> : step<Half, false>)(num_threads, side, rows, width, kept, index, (Half*)param,
                                                         (const Half*)grad, m, v, *s);
    } else {
        (s->adam ? step<float, true> : step<float, false>)(num_threads, side, rows, width, kept, index, (float*)param,
                                                           (const float*)grad, m, v, *s);
    }
}
