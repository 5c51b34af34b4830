/* Sixteen floats at a time, bfloat16, and dot products: what the CPU kernels share.
 * Vectors are those of the compiler; where gcc would take them apart, AVX512 is asked for by name. */

#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

enum { RUN = 32, LANES = 16 };

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

static inline float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
}

static inline uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); /* to nearest, ties to even */
}

static inline lanes load(const float *x) {
    lanes v;
    memcpy(&v, x, sizeof v);
    return v;
}

static inline lanes splat(float x) {
    return (lanes){0} + x;
}

static inline lanes fma_lanes(lanes x, lanes y, lanes sum) {
#ifdef __AVX512F__
    return (lanes)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
#else
    return x * y + sum;
#endif
}

static inline lanes widen_bf16(const uint16_t *x) {
#ifdef __AVX512F__
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
    return (lanes)_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
#else
    lanes v;
    for (int i = 0; i < LANES; i++) v[i] = from_bf16(x[i]);
    return v;
#endif
}

static inline void store_bf16(uint16_t *y, lanes v) {
#ifdef __AVX512F__
    ints bits = (ints)v, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, is_nan = v != v;
    rounded = (rounded & ~is_nan) | (is_nan & 0x7fc0);
    _mm256_storeu_si256((__m256i *)y, _mm512_cvtepi32_epi16((__m512i)rounded));
#else
    for (int i = 0; i < LANES; i++) y[i] = to_bf16(v[i]);
#endif
}

/* Arrays of bfloat16 when half is not 0, else of float32. */
static inline lanes load_as(int half, const void *x, long i) {
    return half ? widen_bf16((const uint16_t *)x + i) : load((const float *)x + i);
}

static inline void store_as(int half, void *y, long i, lanes v) {
    if (half) store_bf16((uint16_t *)y + i, v);
    else memcpy((float *)y + i, &v, sizeof v);
}

static inline float load_one(int half, const void *x, long i) {
    return half ? from_bf16(((const uint16_t *)x)[i]) : ((const float *)x)[i];
}

static inline void store_one(int half, void *y, long i, float value) {
    if (half) ((uint16_t *)y)[i] = to_bf16(value);
    else ((float *)y)[i] = value;
}

static inline float sum_of(lanes v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)v);
#else
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) v[i] += v[i + n];
    return v[0];
#endif
}

/* What a register holds: gcc keeps longer vectors in memory, which makes a product five times as slow. */
#ifdef __AVX512F__
enum { WIDE = LANES };
typedef lanes wide;
#else
enum { WIDE = 8 };
typedef float wide __attribute__((vector_size(4 * WIDE)));
#endif

static inline wide add_product(const float *x, const float *y, wide sum) {
#ifdef __AVX512F__
    return fma_lanes(load(x), load(y), sum);
#else
    wide a, b;
    memcpy(&a, x, sizeof a);
    memcpy(&b, y, sizeof b);
    return a * b + sum;
#endif
}

static inline float dot_f32(const float *w, const float *x, long in) {
    wide sums[RUN / WIDE] = {{0}};
    long i = 0;
    for (; i + RUN <= in; i += RUN)
        for (int j = 0; j < RUN / WIDE; j++) sums[j] = add_product(w + i + WIDE * j, x + i + WIDE * j, sums[j]);
    lanes halves[2];
    memcpy(halves, sums, sizeof halves);
    float sum = sum_of(halves[0] + halves[1]);
    for (; i < in; i++) sum += w[i] * x[i];
    return sum;
}

static inline float dot_bf16(const uint16_t *w, const float *x, long in) {
    lanes a = {0}, b = {0};
    long i = 0;
    for (; i + RUN <= in; i += RUN) {
        a = fma_lanes(widen_bf16(w + i), load(x + i), a);
        b = fma_lanes(widen_bf16(w + i + LANES), load(x + i + LANES), b);
    }
    float sum = sum_of(a + b);
    for (; i < in; i++) sum += from_bf16(w[i]) * x[i];
    return sum;
}
