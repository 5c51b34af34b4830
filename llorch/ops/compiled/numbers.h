/* A register of floats at a time, bfloat16, and dot products: what the CPU kernels share.
 * Vectors are those of the compiler, which keeps longer ones than a register in memory: a twelfth of the speed. Where gcc
 * would take them apart, AVX512 or AVX2 is asked for by name. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX2__ /* which AVX512 includes */
#include <immintrin.h>
#endif

#ifdef __AVX512F__
enum { RUN = 32, LANES = 16 };
#else
enum { RUN = 32, LANES = 8 };
#endif

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

/* The first n floats, zeros after them; n may be more than there are lanes. */
static inline lanes load_some(const float *x, long n) {
    if (n >= LANES) return load(x);
#ifdef __AVX512F__
    return (lanes)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), x);
#elif defined(__AVX2__)
    __m256i place = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return (lanes)_mm256_maskload_ps(x, _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), place));
#else
    lanes v = {0};
    for (long i = 0; i < n; i++) v[i] = x[i];
    return v;
#endif
}

static inline lanes splat(float x) {
#ifdef __AVX512F__
    return (lanes)_mm512_set1_ps(x);
#elif defined(__AVX2__)
    return (lanes)_mm256_set1_ps(x);
#else
    lanes v;
    for (int i = 0; i < LANES; i++) v[i] = x;
    return v;
#endif
}

static inline lanes fma_lanes(lanes x, lanes y, lanes sum) {
#ifdef __AVX512F__
    return (lanes)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
#elif defined(__FMA__)
    return (lanes)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
#else
    return x * y + sum;
#endif
}

static inline lanes widen_bf16(const uint16_t *x) {
#ifdef __AVX512F__
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
    return (lanes)_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
#elif defined(__AVX2__)
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x));
    return (lanes)_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
#else
    lanes v;
    for (int i = 0; i < LANES; i++) v[i] = from_bf16(x[i]);
    return v;
#endif
}

static inline void store_bf16(uint16_t *y, lanes v) {
#ifdef __AVX2__
    ints bits = (ints)v, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16 & 0xffff, is_nan = v != v;
    rounded = (rounded & ~is_nan) | (is_nan & 0x7fc0);
#ifdef __AVX512F__
    _mm256_storeu_si256((__m256i *)y, _mm512_cvtepi32_epi16((__m512i)rounded));
#else
    __m256i all = (__m256i)rounded;
    _mm_storeu_si128((__m128i *)y, _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
#endif
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
#elif defined(__AVX2__)
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) v[i] += v[i + n];
    return v[0];
#endif
}

static inline float dot_f32(const float *w, const float *x, long in) {
    lanes sums[RUN / LANES] = {{0}};
    long i = 0;
    for (; i + RUN <= in; i += RUN)
        for (int j = 0; j < RUN / LANES; j++)
            sums[j] = fma_lanes(load(w + i + LANES * j), load(x + i + LANES * j), sums[j]);
    for (int j = 1; j < RUN / LANES; j++) sums[0] += sums[j];
    float sum = sum_of(sums[0]);
    for (; i < in; i++) sum += w[i] * x[i];
    return sum;
}

static inline lanes choose(ints mask, lanes yes, lanes no) {
    return (lanes)(((ints)yes & mask) | ((ints)no & ~mask));
}

/* 2^n p(r) with x = n ln 2 + r; infinity above the normal floats, and 0 below: a masked score weighs nothing. */
static inline lanes exp_lanes(lanes x) {
    const float low = -87.3f, high = 88.3f, magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to whole numbers */
    ints below = x < low, above = x > high;
    x = choose(below | above, splat(0), x);
    lanes shifted = x * 1.44269504088896341f + magic, n = shifted - magic;
    lanes r = fma_lanes(n, splat(-0.693359375f), x);
    r = fma_lanes(n, splat(2.12194440e-4f), r);
    lanes p = splat(1.0f / 5040);
    const float coefficients[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (int i = 0; i < 7; i++) p = fma_lanes(p, r, splat(coefficients[i]));
    lanes power = (lanes)((ints)p + (((ints)shifted - (ints)splat(magic)) << 23));
    return choose(below, splat(0), choose(above, splat(INFINITY), power));
}
