/* Blocks of ggml, as they lie in a file: the codes of 32 elements, and the factors of the sub-blocks that they are in.
 *
 *     x = scale * code - min        scale, and min where a type has one, belong to a sub-block of 16 or 32 elements
 *
 * Each type has one function for its codes, one for its factors. `kind` and `run` are constants wherever these are called,
 * so the compiler makes a loop for each type. Layouts: llorch/files/blocks, whose decoders give the same bits. */

#pragma once

#include "numbers.h"

enum kind {
    F32, BF16, Q8_0, Q4_0, Q4_K, Q6_K, TABLE_4, TABLE_8, F16, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q5_K, IQ4_NL, IQ4_XS, MXFP4
};
enum { PARTS = RUN / LANES, RUNS = 8 }; /* registers of a run; runs of a super-block */

/* Factors of the sub-blocks of a super-block, in registers: read from memory they would wait to be written. */
typedef struct {
    lanes scale[16 / LANES], min[16 / LANES];
} factors;

static const float IQ4_NUMBERS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const float E2M1_DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static inline int is_super(enum kind kind) {
    return kind == Q2_K || kind == Q3_K || kind == Q4_K || kind == Q5_K || kind == Q6_K || kind == IQ4_XS;
}

static inline int has_min(enum kind kind) {
    return kind == Q4_1 || kind == Q5_1 || kind == Q2_K || kind == Q4_K || kind == Q5_K;
}

/* Sub-blocks of a run. */
static inline int n_subs(enum kind kind) {
    return kind == Q2_K || kind == Q3_K || kind == Q6_K ? 2 : 1;
}

static inline long block_bytes(enum kind kind) {
    switch (kind) {
    case Q8_0: return 34;
    case Q4_0: case IQ4_NL: return 18;
    case Q4_1: return 20;
    case Q5_0: return 22;
    case Q5_1: return 24;
    case MXFP4: return 17;
    case Q2_K: return 84;
    case Q3_K: return 110;
    case Q4_K: return 144;
    case Q5_K: return 176;
    case Q6_K: return 210;
    case IQ4_XS: return 136;
    default: return 0;
    }
}

static inline float from_f16(const void *array, long i) {
#if defined(__F16C__) && defined(__AVX2__) /* what gcc takes for _Float16 waits for the number before: half of the speed */
    uint16_t bits;
    memcpy(&bits, (const char *)array + 2 * i, 2);
    return _cvtsh_ss(bits);
#else
    _Float16 x;
    memcpy(&x, (const char *)array + 2 * i, 2);
    return (float)x;
#endif
}

static inline ints load_bytes(const uint8_t *codes) {
#ifdef __AVX512F__
    return (ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
#elif defined(__AVX2__)
    return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes));
#else
    ints v;
    for (int i = 0; i < LANES; i++) v[i] = codes[i];
    return v;
#endif
}

static inline lanes from_int8(const int8_t *codes) {
#ifdef __AVX512F__
    return (lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes)));
#elif defined(__AVX2__)
    return (lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)codes)));
#else
    lanes v;
    for (int i = 0; i < LANES; i++) v[i] = codes[i];
    return v;
#endif
}

static inline lanes to_floats(ints codes) {
    return __builtin_convertvector(codes, lanes);
}

/* The lower four bits of each code, plus `first`. */
static inline lanes four_bits_of(ints codes, float first) {
#ifdef __AVX512F__ /* a permutation looks at four bits only */
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (lanes)_mm512_permutexvar_ps((__m512i)codes, _mm512_add_ps(numbers, _mm512_set1_ps(first)));
#else
    return to_floats(codes & 15) + first;
#endif
}

/* The lower two bits of each code, times `unit`, plus `first`. */
static inline lanes two_bits_of(ints codes, float unit, float first) {
#ifdef __AVX512F__
    const __m512 numbers = _mm512_setr4_ps(first, unit + first, 2 * unit + first, 3 * unit + first);
    return (lanes)_mm512_permutexvar_ps((__m512i)codes, numbers);
#else
    return to_floats(codes & 3) * unit + first;
#endif
}

/* The number of the lower four bits of each code. */
static inline lanes number_of(ints codes, const float *numbers) {
#ifdef __AVX512F__
    return (lanes)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(numbers));
#elif defined(__AVX2__)
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(numbers), (__m256i)codes);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(numbers + 8), (__m256i)codes);
    return (lanes)_mm256_blendv_ps(low, high, (__m256)(codes << 28));
#else
    lanes v;
    for (int i = 0; i < LANES; i++) v[i] = numbers[codes[i] & 15];
    return v;
#endif
}

/* Adds a number where bit `bit` of a code is set. */
static inline lanes add_where(lanes part, ints codes, int bit, float number) {
#ifdef __AVX512F__
    __mmask16 mask = _mm512_test_epi32_mask((__m512i)codes, _mm512_set1_epi32(1 << bit));
    return (lanes)_mm512_mask_add_ps((__m512)part, mask, (__m512)part, _mm512_set1_ps(number));
#else
    return part + to_floats(codes >> bit & 1) * number;
#endif
}

/* Adds 16 where bit `first` + i of `bits` is set, for lane i. */
static inline lanes add_fifth_bits(lanes part, const uint8_t *bits, int first) {
    uint32_t word;
    memcpy(&word, bits, sizeof word);
#ifdef __AVX512F__
    return (lanes)_mm512_mask_add_ps((__m512)part, (__mmask16)(word >> first), (__m512)part, _mm512_set1_ps(16));
#else
    const ints lane = {0, 1, 2, 3, 4, 5, 6, 7};
    return part + to_floats((((ints){0} + (int32_t)(word >> first)) >> lane & 1) * 16);
#endif
}

/* Part k of 32 codes of four bits: 16 bytes have the first 16 elements in their lower halves. */
static inline ints halves(const uint8_t *bytes, int k) {
    return load_bytes(bytes + LANES * k % 16) >> (LANES * k < 16 ? 0 : 4);
}

/* Part k of the codes of run `run` of a block. */
static inline lanes part_of_run(enum kind kind, const uint8_t *block, int run, int k) {
    const int half = run / 4, quarter = run % 4; /* of a super-block whose codes of two bits are 32 bytes apart */
    switch (kind) {
    case Q8_0: return from_int8((const int8_t *)block + 2 + LANES * k);
    case Q4_0: return four_bits_of(halves(block + 2, k), -8);
    case Q4_1: return four_bits_of(halves(block + 4, k), 0);
    case Q5_0: return add_fifth_bits(four_bits_of(halves(block + 6, k), -16), block + 2, LANES * k);
    case Q5_1: return add_fifth_bits(four_bits_of(halves(block + 8, k), 0), block + 4, LANES * k);
    case IQ4_NL: return number_of(halves(block + 2, k), IQ4_NUMBERS);
    case MXFP4: return number_of(halves(block + 1, k), E2M1_DOUBLED);
    case IQ4_XS: return number_of(halves(block + 8 + 16 * run, k), IQ4_NUMBERS);
    case Q4_K: return four_bits_of(load_bytes(block + 16 + 32 * (run / 2) + LANES * k) >> run % 2 * 4, 0);
    case Q5_K:
        return add_where(four_bits_of(load_bytes(block + 48 + 32 * (run / 2) + LANES * k) >> run % 2 * 4, 0),
                         load_bytes(block + 16 + LANES * k), run, 16);
    case Q2_K: return two_bits_of(load_bytes(block + 16 + 32 * half + LANES * k) >> 2 * quarter, 1, 0);
    case Q3_K:
        return add_where(two_bits_of(load_bytes(block + 32 + 32 * half + LANES * k) >> 2 * quarter, 1, -4),
                         load_bytes(block + LANES * k), run, 4);
    default: { /* Q6_K */
        ints lower = load_bytes(block + 64 * half + 32 * (run % 2) + LANES * k) >> quarter / 2 * 4;
        ints upper = load_bytes(block + 128 + 32 * half + LANES * k) >> 2 * quarter;
        return four_bits_of(lower, -32) + two_bits_of(upper, 16, 0);
    }
    }
}

static inline float e8m0_halved(uint8_t exponent) {
    uint32_t bits = exponent < 2 ? 0x00200000u << exponent : (uint32_t)(exponent - 1) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return scale;
}

/* The scale of a block of 32. */
static inline float scale_of(enum kind kind, const uint8_t *block) {
    return kind == MXFP4 ? e8m0_halved(block[0]) : from_f16(block, 0);
}

/* Sixteen bytes as floats, times a factor. */
static inline void scale_bytes(uint64_t low, uint64_t high, float factor, lanes *to) {
#ifdef __AVX512F__
    to[0] = to_floats((ints)_mm512_cvtepu8_epi32(_mm_set_epi64x((long long)high, (long long)low))) * factor;
#else
    const uint64_t words[2] = {low, high};
    for (int k = 0; k < 2; k++) to[k] = to_floats(load_bytes((const uint8_t *)&words[k])) * factor;
#endif
}

static inline uint64_t join_words(uint32_t low, uint32_t high) {
    return low | (uint64_t)high << 32;
}

/* Eight scales and eight minima of six bits, in twelve bytes. */
static inline void factors_of_q4_k(const uint8_t *block, factors *f) {
    uint32_t first, second, third;
    memcpy(&first, block + 4, 4), memcpy(&second, block + 8, 4), memcpy(&third, block + 12, 4);
    uint32_t upper = (third & 0x0f0f0f0f) | (first >> 6 & 0x03030303) << 4;
    uint32_t upper_min = (third >> 4 & 0x0f0f0f0f) | (second >> 6 & 0x03030303) << 4;
    scale_bytes(join_words(first & 0x3f3f3f3f, upper), 0, from_f16(block, 0), f->scale);
    scale_bytes(join_words(second & 0x3f3f3f3f, upper_min), 0, from_f16(block, 1), f->min);
}

/* Sixteen scales of six bits: the lower four in eight bytes, the upper two in four. */
static inline void factors_of_q3_k(const uint8_t *block, factors *f) {
    uint32_t first, second, upper, words[4];
    memcpy(&first, block + 96, 4), memcpy(&second, block + 100, 4), memcpy(&upper, block + 104, 4);
    words[0] = first & 0x0f0f0f0f, words[1] = second & 0x0f0f0f0f;
    words[2] = first >> 4 & 0x0f0f0f0f, words[3] = second >> 4 & 0x0f0f0f0f;
    for (int i = 0; i < 4; i++) words[i] |= (upper >> 2 * i & 0x03030303) << 4;
    scale_bytes(join_words(words[0], words[1]), join_words(words[2], words[3]), 1, f->scale);
    for (int k = 0; k < 16 / LANES; k++) f->scale[k] = (f->scale[k] - 32) * from_f16(block + 108, 0);
}

static inline void factors_of_iq4_xs(const uint8_t *block, factors *f) {
    const ints lane = {0, 1, 2, 3, 4, 5, 6, 7}; /* others are not used */
    uint32_t lower;
    uint16_t upper;
    memcpy(&lower, block + 4, 4), memcpy(&upper, block + 2, 2);
    ints scale = (((ints){0} + (int32_t)lower) >> 4 * lane & 15) | (((ints){0} + upper) >> 2 * lane & 3) << 4;
    f->scale[0] = to_floats(scale - 32) * from_f16(block, 0);
}

/* The factors of a super-block. */
static inline void factors_of(enum kind kind, const uint8_t *block, factors *f) {
    if (kind == Q4_K || kind == Q5_K) factors_of_q4_k(block, f);
    if (kind == Q3_K) factors_of_q3_k(block, f);
    if (kind == IQ4_XS) factors_of_iq4_xs(block, f);
    for (int k = 0; k < 16 / LANES; k++) {
        if (kind == Q6_K) f->scale[k] = from_int8((const int8_t *)block + 192 + LANES * k) * from_f16(block + 208, 0);
        if (kind != Q2_K) continue;
        ints both = load_bytes(block + LANES * k);
        f->scale[k] = to_floats(both & 15) * from_f16(block + 80, 0), f->min[k] = to_floats(both >> 4) * from_f16(block + 82, 0);
    }
}

/* One factor in all lanes. */
static inline lanes spread(const lanes *factors, int i) {
#ifdef __AVX512F__
    return (lanes)_mm512_permutexvar_ps(_mm512_set1_epi32(i), (__m512)factors[0]);
#elif defined(__AVX2__)
    return (lanes)_mm256_permutevar8x32_ps((__m256)factors[i / LANES], _mm256_set1_epi32(i % LANES));
#else
    return splat(factors[i / LANES][i % LANES]);
#endif
}
