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

// The same `kept` columns of each row.
template <typename T, bool ADAM>
static void columns(int64_t num_threads, int64_t rows, int64_t width, int64_t kept, const int32_t* index, T* param,
                    const T* grad, float* m, float* v, const SubspaceSettings& s) {
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
