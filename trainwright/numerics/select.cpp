// One pass that counts the magnitudes above a range and keeps those in it.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

struct Found {
    int64_t num_kept, num_at_most;
};

// Values are fp32, or bf16: the upper half of an fp32.
typedef uint16_t Half;

static inline float magnitude_of(float value) { return std::fabs(value); }
static inline float magnitude_of(Half value) {
    uint32_t bits = (uint32_t)(value & 0x7fff) << 16;
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    return magnitude;
}
#ifdef __AVX512F__
static inline __m512 sixteen_from(const float* values) { return _mm512_abs_ps(_mm512_loadu_ps(values)); }
static inline __m512 sixteen_from(const Half* values) {
    __m512i halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)values));
    return _mm512_abs_ps(_mm512_castsi512_ps(_mm512_slli_epi32(halves, 16)));
}
#endif

template <typename T> static Found keep_some(const T* values, int64_t size, float low, float high, float* kept) {
    Found found = {0, 0};
    int64_t i = 0;
#ifdef __AVX512F__
    __m512 lowest = _mm512_set1_ps(low), highest = _mm512_set1_ps(high);
    for (; i + 16 <= size; i += 16) {
        __m512 magnitudes = sixteen_from(values + i);
        __mmask16 at_most = _mm512_cmp_ps_mask(magnitudes, highest, _CMP_LE_OQ);
        __mmask16 inside = _mm512_mask_cmp_ps_mask(at_most, magnitudes, lowest, _CMP_GE_OQ);
        // All sixteen, of which the next ones write over what is not inside.
        _mm512_storeu_ps(kept + found.num_kept, _mm512_maskz_compress_ps(inside, magnitudes));
        found.num_at_most += __builtin_popcount(at_most);
        found.num_kept += __builtin_popcount(inside);
    }
#endif
    for (; i < size; ++i) {
        float magnitude = magnitude_of(values[i]);
        if (!(magnitude <= high)) continue;
        ++found.num_at_most;
        if (magnitude >= low) kept[found.num_kept++] = magnitude;
    }
    return found;
}

template <typename T>
static int64_t keep_parts(int64_t num_threads, const T* values, int64_t size, float low, float high, float* kept,
                          int64_t* num_above) {
    std::vector<Found> found(num_threads);
    int64_t num_parts = 1;
#pragma omp parallel num_threads(num_threads)
    {
        int64_t part = omp_get_thread_num(), parts = omp_get_num_threads(), begin = size * part / parts;
        found[part] = keep_some(values + begin, size * (part + 1) / parts - begin, low, high, kept + begin);
#pragma omp single
        num_parts = parts;
    }
    int64_t num_kept = 0;
    *num_above = size;
    for (int64_t part = 0; part < num_parts; ++part) {
        std::memmove(kept + num_kept, kept + size * part / num_parts, found[part].num_kept * sizeof(float));
        num_kept += found[part].num_kept;
        *num_above -= found[part].num_at_most;
    }
    return num_kept;
}

// `kept` has room for all; NaN counts as above. Returns how many were kept.
extern "C" int64_t keep_between(int64_t num_threads, int64_t narrow, const void* values, int64_t size, float low,
                                float high, float* kept, int64_t* num_above) {
    if (narrow) return keep_parts(num_threads, (const Half*)values, size, low, high, kept, num_above);
    return keep_parts(num_threads, (const float*)values, size, low, high, kept, num_above);
}
