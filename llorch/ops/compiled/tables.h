/* Matrices of quantised folders: codes that index a table of numbers, with scales, zero points and minima of groups.
 *
 * A group has 16 columns, or a multiple of 32. Layouts: llorch/files/quantised/fields.py. */

#pragma once

#include "blocks.h"

enum { AHEAD = 4096 }; /* bytes to fetch early: the processor does not look beyond a page by itself */

/* One copy for each kind of matrix, except on x86 without AVX2, where gcc takes 40 s to compile the copies. */
#if defined(__AVX2__) || !defined(__x86_64__)
#define SPECIALISED static inline __attribute__((always_inline))
#else
#define SPECIALISED static inline
#endif

typedef struct {
    const void *codes, *d, *scales, *more; /* d, scales, more: of a table, whose scales are `shared`; more: its offsets */
} fields;

/* A table's part that all rows share. `way` names the instructions that turn codes into numbers:
 * EVEN numbers are integers in a row, from the first one on. Codes of four bits are always looked up. Products with minima use the numbers less `centre`, and minima that make up for it: without a centre two large sums
 * would be subtracted. */
typedef struct {
    int32_t runs, way, offset;     /* runs of 32 that share a scale; 0: a run has two scales */
    float factor, divisor, centre; /* factor and divisor of all numbers, applied last */
    float values[256], centred[256];
} shared;
enum way { LOOK_UP, SIGNED, E4M3, EVEN };
enum offset { NO_OFFSET, ZERO, MINIMUM }; /* the meaning of `more` */

/* Codes of part k of 32 codes of four bits, in the lowest bits: element 4 j + i is part j of word i. */
static inline ints codes_of_words(const uint8_t *codes, int k) {
#ifdef __AVX512F__
    const __m512i shift = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
    __m512i words = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)codes));
    return (ints)_mm512_srlv_epi32(words, _mm512_add_epi32(shift, _mm512_set1_epi32(16 * k)));
#elif defined(__AVX2__)
    __m256i words = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)codes));
    return (ints)_mm256_srlv_epi32(words, _mm256_add_epi32(_mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4), _mm256_set1_epi32(8 * k)));
#else
    uint32_t word[4];
    ints v;
    memcpy(word, codes, sizeof word);
    for (int i = 0; i < LANES; i++) v[i] = (int32_t)(word[i % 4] >> (i + LANES * k) / 4 * 4 & 15);
    return v;
#endif
}

static inline lanes from_uint8(const uint8_t *codes) {
    return to_floats(load_bytes(codes));
}

#ifdef __AVX512VBMI__
/* The upper two bytes of the float32 of each E4M3 code without its sign, divided by 256. */
#define EVEN_EXPONENT 0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70
#define ODD_EXPONENT 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0
#define TWO_EXPONENTS EVEN_EXPONENT, ODD_EXPONENT
static const uint8_t E4M3_LOW[128] = {
    0x00, 0x00, 0x80, 0xc0, 0x00, 0x20, 0x40, 0x60, ODD_EXPONENT, TWO_EXPONENTS, TWO_EXPONENTS,
    TWO_EXPONENTS, TWO_EXPONENTS, TWO_EXPONENTS, TWO_EXPONENTS, TWO_EXPONENTS};
static const uint8_t E4M3_HIGH[128] = {
    0, 55, 55, 55, [4 ... 15] = 56, [16 ... 31] = 57, [32 ... 47] = 58, [48 ... 63] = 59, [64 ... 79] = 60,
    [80 ... 95] = 61, [96 ... 111] = 62, [112 ... 127] = 63};
#define TWICE(j) j, j, 16 + j, 16 + j
static const uint8_t CODES_TWICE[64] = {
    TWICE(0), TWICE(1), TWICE(2), TWICE(3), TWICE(4), TWICE(5), TWICE(6), TWICE(7), TWICE(8), TWICE(9), TWICE(10),
    TWICE(11), TWICE(12), TWICE(13), TWICE(14), TWICE(15)};
#endif

/* The numbers of 32 E4M3 bytes, divided by 256. With AVX512-VBMI their bytes are looked up in two tables. Elsewhere the bits
 * are moved to those of a float16 whose exponent is 8 too small, and converted, which takes more instructions. */
static inline void e4m3_run(const uint8_t *codes, lanes *part) {
#ifdef __AVX512VBMI__
    const uint8_t *low = E4M3_LOW, *high = E4M3_HIGH;
    const __mmask64 lower_bytes = 0x5555555555555555;
    __m512i wide = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)codes));
    wide = _mm512_permutexvar_epi8(_mm512_loadu_si512(CODES_TWICE), wide); /* word 2 j: code j; 2 j + 1: code 16 + j */
    __m512i number = _mm512_mask2_permutex2var_epi8(
        _mm512_loadu_si512(low), wide, lower_bytes, _mm512_loadu_si512(low + 64));
    number = _mm512_mask2_permutex2var_epi8(
        _mm512_loadu_si512(high), number, ~lower_bytes, _mm512_loadu_si512(high + 64));
    number = _mm512_or_si512(number, _mm512_and_si512(wide, _mm512_set1_epi16((short)0x8000)));
    part[0] = (lanes)_mm512_slli_epi32(number, 16);
    part[1] = (lanes)_mm512_and_si512(number, _mm512_set1_epi32((int)0xffff0000));
#elif defined(__AVX512F__)
    __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)codes));
    __m512i halves = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16((short)0xbf80));
    part[0] = (lanes)_mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    part[1] = (lanes)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
#elif defined(__AVX2__) && defined(__F16C__)
    for (int k = 0; k < PARTS; k += 2) {
        __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(codes + LANES * k)));
        __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbf80));
        part[k] = (lanes)_mm256_cvtph_ps(_mm256_castsi256_si128(halves));
        part[k + 1] = (lanes)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
    }
#else
    for (int e = 0; e < RUN; e++) {
        uint16_t half = (uint16_t)((codes[e] & 0x80) << 8 | (codes[e] & 0x7f) << 7);
        part[e / LANES][e % LANES] = from_f16(&half, 0);
    }
#endif
}

static inline lanes look_up(const uint8_t *codes, const float *values) {
#ifdef __AVX512F__
    return (lanes)_mm512_i32gather_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes)), values, 4);
#elif defined(__AVX2__)
    return (lanes)_mm256_i32gather_ps(values, _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes)), 4);
#else
    lanes v;
    for (int i = 0; i < LANES; i++) v[i] = values[codes[i]];
    return v;
#endif
}

/* Numbers of run i before they are scaled, those of E4M3 divided by `unit_of`; centred: less the centre. */
SPECIALISED void table_run(enum kind kind, const fields *f, enum way way, long i, int centred, lanes *part) {
    const shared *table = (const shared *)f->scales;
    const float *values = centred ? table->centred : table->values;
    const uint8_t *codes = (const uint8_t *)f->codes + (kind == TABLE_4 ? RUN / 2 : RUN) * i;
    if (kind == TABLE_8 && way == E4M3) e4m3_run(codes, part);
    for (int k = 0; (kind == TABLE_4 || way != E4M3) && k < PARTS; k++) {
        if (kind == TABLE_4) part[k] = number_of(codes_of_words(codes, k), values);
        else if (way == SIGNED) part[k] = from_int8((const int8_t *)codes + LANES * k);
        else if (way == EVEN) part[k] = from_uint8(codes + LANES * k) + splat(values[0]);
        else part[k] = look_up(codes + LANES * k, values);
    }
}

static inline float unit_of(enum way way) {
    return way == E4M3 ? 256 : 1;
}

SPECIALISED void add_table_run(
    enum kind kind, const fields *f, enum way way, long i, const float *x, const float *zero, lanes *sums) {
    lanes part[PARTS];
    table_run(kind, f, way, i, 1, part);
    for (int k = 0; k < PARTS; k++) {
        if (zero) part[k] -= splat(*zero);
        sums[k] = fma_lanes(part[k], load(x + LANES * k), sums[k]);
    }
}

/* Products of n runs, from run i on, with the inputs at x. zero: the zero point that they share; NULL: none.
 * Four sums run at once, because an addition waits for the addition before it. */
SPECIALISED lanes dot_group(
    enum kind kind, const fields *f, enum way way, long i, long n, const float *x, const float *zero) {
    const long bytes = kind == TABLE_8 ? RUN : RUN / 2;
    lanes sums[4] = {{0}}, *odd = sums + 4 - PARTS;
    for (long at = 0; at + 2 <= n; at += 2) __builtin_prefetch((const char *)f->codes + (i + at) * bytes + AHEAD);
    long r = 0;
    for (; r + 2 <= n; r += 2) {
        add_table_run(kind, f, way, i + r, x + RUN * r, zero, sums);
        add_table_run(kind, f, way, i + r + 1, x + RUN * (r + 1), zero, odd);
    }
    if (r < n) add_table_run(kind, f, way, i + r, x + RUN * r, zero, sums);
    return n == 1 && PARTS == 2 ? sums[0] + sums[1] : (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/* A row whose groups have `runs` runs, a constant where it is small: the compiler makes one loop for each.
 * whole: the groups are parts of one, so all have the scale and zero point of the row.
 * Two sums take turns. A loop of two groups would have each body three times, and compiling it would take twice as long. */
SPECIALISED lanes dot_groups(
    enum kind kind, const fields *f, enum way way, int zeros, long runs, int whole, long row, const float *x, long in) {
    const long n = in / RUN / runs, first = row * n, bytes = kind == TABLE_8 ? RUN : RUN / 2, step = !whole;
    const float *d = (const float *)f->d + (whole ? row : first), *zero = (const float *)f->more + (whole ? row : first);
    lanes even = {0}, odd = {0};
    for (long g = 0; g < n; g++) {
        if (runs == 1) __builtin_prefetch((const char *)f->codes + (first + g) * bytes + AHEAD);
        lanes one = dot_group(
            kind, f, way, (first + g) * runs, runs, x + RUN * runs * g, zeros ? zero + g * step : NULL);
        lanes other = odd;
        odd = fma_lanes(one, splat(d[g * step]), even), even = other;
    }
    return even + odd;
}

/* Adds the products of run i, whose halves have scales of their own, with the inputs at x. */
SPECIALISED void add_halves(
    enum kind kind, const fields *f, enum way way, int zeros, long i, const float *x, lanes *sums) {
    const float *d = (const float *)f->d + 2 * i, *zero = (const float *)f->more + 2 * i;
    lanes part[PARTS], products[2];
    table_run(kind, f, way, i, 1, part);
    for (int k = 0; k < PARTS; k++) {
        lanes *to = products + (k >= PARTS / 2), input = load(x + LANES * k);
        if (zeros) part[k] -= splat(zero[k >= PARTS / 2]);
        *to = k % (PARTS / 2) ? fma_lanes(part[k], input, *to) : part[k] * input;
    }
    for (int half = 0; half < 2; half++) sums[half] = fma_lanes(products[half], splat(d[half]), sums[half]);
}

/* A row whose groups have sixteen elements. */
SPECIALISED lanes dot_halves(
    enum kind kind, const fields *f, enum way way, int zeros, long row, const float *x, long in) {
    const long n = in / RUN, first = row * n, bytes = kind == TABLE_8 ? RUN : RUN / 2;
    lanes even[2] = {{0}}, odd[2] = {{0}};
    for (long i = 0; i < n; i++) {
        __builtin_prefetch((const char *)f->codes + (first + i) * bytes + AHEAD);
        add_halves(kind, f, way, zeros, first + i, x + RUN * i, even);
        for (int half = 0; half < 2; half++) {
            lanes other = odd[half];
            odd[half] = even[half], even[half] = other;
        }
    }
    return even[0] + even[1] + odd[0] + odd[1];
}

SPECIALISED lanes dot_way(
    enum kind kind, const fields *f, enum way way, int zeros, long row, const float *x, long in) {
    const long runs = ((const shared *)f->scales)->runs;
    const int whole = RUN * runs == in && runs % 4 == 0;
    switch (whole ? 4 : runs) {
    case 0: return dot_halves(kind, f, way, zeros, row, x, in);
    case 1: return dot_groups(kind, f, way, zeros, 1, 0, row, x, in);
    case 2: return dot_groups(kind, f, way, zeros, 2, 0, row, x, in);
    case 4: return dot_groups(kind, f, way, zeros, 4, whole, row, x, in);
    default: return dot_groups(kind, f, way, zeros, runs, 0, row, x, in);
    }
}

static inline long columns_of_group(const shared *table) {
    return table->runs ? RUN * table->runs : RUN / 2;
}

/* Minima of a row times the sums of the inputs of each group. */
static inline lanes dot_offsets(const fields *f, long row, const float *sums, long n) {
    const shared *table = (const shared *)f->scales;
    const lanes centre = splat(table->centre);
    const float *d = (const float *)f->d + row * n, *more = (const float *)f->more + row * n;
    lanes total = {0};
    for (long g = 0; g < n; g += LANES) {
        lanes offset = load_some(more + g, n - g), scale = load_some(d + g, n - g);
        offset = fma_lanes(scale, centre, offset);
        total = fma_lanes(offset, load_some(sums + g, n - g), total);
    }
    return total;
}

/* sums: of the inputs of each group, where a table has minima. */
static inline float dot_table(int kind, const fields *f, long row, const float *x, const float *sums, long in) {
    const shared *table = (const shared *)f->scales;
    const int zeros = table->offset == ZERO;
    lanes total;
#define DOT_WAY(KIND, WAY) zeros ? dot_way(KIND, f, WAY, 1, row, x, in) : dot_way(KIND, f, WAY, 0, row, x, in)
    if (kind == TABLE_4) total = DOT_WAY(TABLE_4, LOOK_UP);
    else if (table->way == SIGNED) total = DOT_WAY(TABLE_8, SIGNED);
    else if (table->way == E4M3) total = dot_way(TABLE_8, f, E4M3, 0, row, x, in) * unit_of(E4M3);
    else if (table->way == EVEN) total = DOT_WAY(TABLE_8, EVEN);
    else total = DOT_WAY(TABLE_8, LOOK_UP);
#undef DOT_WAY
    if (sums) total += dot_offsets(f, row, sums, in / columns_of_group(table));
    return sum_of(total) * table->factor / table->divisor;
}
