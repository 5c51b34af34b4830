/* Products of a few rows with a stored matrix, those of experts with any, and the decoding of stored rows.
 *
 *     y = x W^T + bias        every sum in float32, rounded once when x is bfloat16
 *
 * One row is multiplied as the matrix is read, at the speed of the memory. For several rows, each row of the matrix is
 * decoded once, except those of floats. Compiled with contraction off, so that decoded numbers have the bits of llorch/files/blocks; sums fuse on
 * purpose. */

#include "layer.h"
#include "tables.h"

static inline lanes widen_f16(const uint16_t *x) {
#ifdef __AVX512F__
    return (lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x));
#elif defined(__AVX2__) && defined(__F16C__)
    return (lanes)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x));
#else
    lanes v;
    for (int i = 0; i < LANES; i++) v[i] = from_f16(x, i);
    return v;
#endif
}

static inline lanes load_dense(enum kind kind, const void *w, long i) {
    return kind == F16 ? widen_f16((const uint16_t *)w + i) : load_as(kind == BF16, w, i);
}

static inline float load_dense_one(enum kind kind, const void *w, long i) {
    return kind == F16 ? from_f16(w, i) : load_one(kind == BF16, w, i);
}

/* A row of floats, 64 at a time: with fewer sums, an addition waits for the addition before it. */
SPECIALISED float dot_dense(enum kind kind, const void *codes, long row, const float *x, long in) {
    enum { STEP = 64, SUMS = STEP / LANES };
    const char *w = (const char *)codes + row * in * (kind == F32 ? 4 : 2);
    lanes sums[SUMS] = {{0}};
    long i = 0;
    for (; i + STEP <= in; i += STEP) {
        for (int k = 0; k < SUMS; k++)
            sums[k] = fma_lanes(load_dense(kind, w, i + LANES * k), load(x + i + LANES * k), sums[k]);
    }
    for (int n = SUMS / 2; n; n /= 2)
        for (int k = 0; k < n; k++) sums[k] += sums[k + n];
    float sum = sum_of(sums[0]);
    for (; i < in; i++) sum += load_dense_one(kind, w, i) * x[i];
    return sum;
}

/* The product of a run with the inputs at x; of a run of two sub-blocks, each of them. */
SPECIALISED void dot_run(enum kind kind, const uint8_t *block, int run, const float *x, lanes *products) {
    for (int k = 0; k < PARTS; k++) {
        lanes part = part_of_run(kind, block, run, k), input = load(x + LANES * k);
        int sub = n_subs(kind) == 2 && k >= PARTS / 2, starts = k == 0 || (n_subs(kind) == 2 && k == PARTS / 2);
        products[sub] = starts ? part * input : fma_lanes(part, input, products[sub]);
    }
}

/* A row of blocks of 32. sums: of the inputs of each block, where the type has minima. */
SPECIALISED float dot_blocks(enum kind kind, const uint8_t *block, const float *x, const float *sums, long in) {
    const long bytes = block_bytes(kind);
    lanes even = {0}, odd = {0}, product;
    float minima = 0;
    for (long i = 0; i < in / RUN; i++, block += bytes) {
        __builtin_prefetch(block + AHEAD);
        dot_run(kind, block, 0, x + RUN * i, &product);
        lanes other = odd;
        odd = fma_lanes(product, splat(scale_of(kind, block)), even), even = other;
        if (has_min(kind)) minima += from_f16(block, 1) * sums[i];
    }
    return sum_of(even + odd) + minima;
}

/* A row of super-blocks. sums: of the inputs of each sub-block, where the type has minima. */
SPECIALISED float dot_super(enum kind kind, const uint8_t *block, const float *x, const float *sums, long in) {
    const long bytes = block_bytes(kind);
    const int subs = n_subs(kind), n = RUNS * subs;
    lanes total[2] = {{0}}, product[2], minima = {0};
    factors f = {0};
    for (long i = 0; i < in / (RUN * RUNS); i++, block += bytes) {
        for (long b = 0; b < bytes; b += 64) __builtin_prefetch(block + b + AHEAD);
        factors_of(kind, block, &f);
#pragma GCC unroll 8
        for (int run = 0; run < RUNS; run++) {
            dot_run(kind, block, run, x + RUN * (RUNS * i + run), product);
            for (int sub = 0; sub < subs; sub++) {
                lanes *to = total + (subs == 2 ? sub : run % 2);
                *to = fma_lanes(product[sub], spread(f.scale, subs * run + sub), *to);
            }
        }
        for (int s = 0; has_min(kind) && s < n; s += LANES)
            minima = fma_lanes(f.min[s / LANES], load_some(sums + n * i + s, n - s), minima);
    }
    return sum_of(total[0] + total[1] - minima);
}

SPECIALISED float dot_packed(enum kind kind, const void *codes, long row, const float *x, const float *sums, long in) {
    const long size = is_super(kind) ? RUN * RUNS : RUN;
    const uint8_t *blocks = (const uint8_t *)codes + row * (in / size) * block_bytes(kind);
    return is_super(kind) ? dot_super(kind, blocks, x, sums, in) : dot_blocks(kind, blocks, x, sums, in);
}

/* Each type has a function of its own: together they would be too large for the compiler. */
#define EACH_TYPE(USE) \
    USE(Q8_0) USE(Q4_0) USE(Q4_1) USE(Q5_0) USE(Q5_1) USE(IQ4_NL) USE(MXFP4) USE(Q2_K) USE(Q3_K) USE(Q4_K) USE(Q5_K) \
    USE(Q6_K) USE(IQ4_XS)
#define DOT(KIND) \
    static float dot_##KIND(const void *codes, long row, const float *x, const float *sums, long in) { \
        return dot_packed(KIND, codes, row, x, sums, in); \
    }
EACH_TYPE(DOT)

static float dot(int kind, const fields *f, long row, const float *x, const float *sums, long in) {
    switch (kind) {
    case F32: return dot_dense(F32, f->codes, row, x, in);
    case BF16: return dot_dense(BF16, f->codes, row, x, in);
    case F16: return dot_dense(F16, f->codes, row, x, in);
#define CASE(KIND) case KIND: return dot_##KIND(f->codes, row, x, sums, in);
    EACH_TYPE(CASE)
#undef CASE
    default: return dot_table(kind, f, row, x, sums, in);
    }
}

/* Columns whose inputs are summed, because their minimum is one number; 0: no minima. */
static long columns_of_minimum(int kind, const fields *f) {
    if (kind != TABLE_4 && kind != TABLE_8) return has_min(kind) ? RUN / n_subs(kind) : 0;
    const shared *table = (const shared *)f->scales;
    return table->offset == MINIMUM ? columns_of_group(table) : 0;
}

/* Sums of the inputs of each group of `size` columns; NULL without groups, or where memory is lacking. */
static float *sums_of_groups(const float *x, long n, long size) {
    float *sums = size ? malloc(sizeof(float) * (size_t)(n / size)) : NULL;
    for (long g = 0; sums && g < n / size; g++) {
        lanes total = {0};
        for (long i = 0; i < size; i += LANES) total += load(x + g * size + i);
        sums[g] = sum_of(total);
    }
    return sums;
}

static int multiply_row(int kind, const fields *f, const float *x, float *y, long out, long in) {
    const long size = columns_of_minimum(kind, f);
    float *sums = sums_of_groups(x, in, size);
    if (size && !sums) return 1;
#pragma omp parallel for schedule(static) if (out * in > 1 << 14)
    for (long r = 0; r < out; r++) y[r] = dot(kind, f, r, x, sums, in);
    free(sums);
    return 0;
}

/* Several rows: a row of the matrix is decoded, then multiplied by each; floats are read again. */
static int multiply_rows(int kind, const fields *f, const float *x, float *y, long rows, long out, long in) {
    int lacking = 0;
#pragma omp parallel reduction(| : lacking) if (out * in > 1 << 14)
    {
        const int dense = kind == F32 || kind == BF16 || kind == F16;
        float *decoded = dense ? NULL : malloc(sizeof(float) * (size_t)in);
        lacking |= !dense && !decoded;
#pragma omp for schedule(static)
        for (long r = 0; r < out; r++) {
            if (decoded) llorch_decode_runs(kind, f->codes, f->d, f->scales, f->more, 0, decoded, r * (in / RUN), in / RUN);
            for (long m = 0; m < rows; m++) {
                if (dense) y[m * out + r] = dot(kind, f, r, x + m * in, NULL, in);
                else if (decoded) y[m * out + r] = dot_dense(F32, decoded, 0, x + m * in, in);
            }
        }
        free(decoded);
    }
    return lacking;
}

static void copy_as(int from_half, const void *x, int to_half, void *y, long n) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) store_as(to_half, y, i, load_as(from_half, x, i));
    for (; i < n; i++) store_one(to_half, y, i, load_one(from_half, x, i));
}

int llorch_product(int kind, const void *codes, const void *d, const void *scales, const void *more, int half,
                   const void *x, const void *bias, void *y, long rows, long out, long in) {
    const fields f = {codes, d, scales, more};
    float *wide = half ? malloc(sizeof(float) * (size_t)rows * (size_t)(in + out)) : NULL;
    if (half && !wide) return 1;
    float *sums = half ? wide + rows * in : y;
    if (half) copy_as(1, x, 0, wide, rows * in);
    const float *inputs = half ? wide : x;
    int lacking = rows == 1 ? multiply_row(kind, &f, inputs, sums, out, in) : multiply_rows(kind, &f, inputs, sums, rows, out, in);
    for (long i = 0; bias && i < rows * out; i++) sums[i] += load_one(half, bias, i % out);
    if (half) copy_as(0, sums, 1, y, rows * out);
    free(wide);
    return lacking;
}

/* As llorch_product, each row with the matrix of the expert that ids names; of x a row is used `share` times. 1 when
 * memory is lacking, 2 when an expert does not exist. */
int llorch_expert_product(int kind, const void *codes, const void *d, const void *scales, const void *more, int half,
                          const void *x, const int64_t *ids, void *y, long rows, long share, long experts, long out,
                          long in) {
    const fields f = {codes, d, scales, more};
    const long n_inputs = rows / share, size = columns_of_minimum(kind, &f);
    for (long m = 0; m < rows; m++)
        if (ids[m] < 0 || ids[m] >= experts) return 2;
    float *wide = malloc(sizeof(float) * (size_t)n_inputs * (size_t)in), *sums = NULL;
    if (!wide) return 1;
    copy_as(half, x, 0, wide, n_inputs * in);
    sums = sums_of_groups(wide, n_inputs * in, size);
    int lacking = size && !sums;
#pragma omp parallel for schedule(static)
    for (long i = 0; i < rows * out; i++) {
        long m = i / out, input = m / share, row = ids[m] * out + i % out;
        if (!lacking)
            store_one(half, y, i, dot(kind, &f, row, wide + input * in, sums ? sums + input * (in / size) : NULL, in));
    }
    free(sums);
    free(wide);
    return lacking;
}

SPECIALISED void decode_blocks(enum kind kind, const void *codes, long first, long n, int half, void *y) {
    const int runs = is_super(kind) ? RUNS : 1, subs = n_subs(kind);
    const uint8_t *block = (const uint8_t *)codes + first / runs * block_bytes(kind);
    factors f = {0};
    for (long i = 0; i < n / runs; i++, block += block_bytes(kind)) {
        if (is_super(kind)) factors_of(kind, block, &f);
        else f.scale[0] = splat(scale_of(kind, block)), f.min[0] = splat(has_min(kind) ? -from_f16(block, 1) : 0);
#pragma GCC unroll 8
        for (int run = 0; run < runs; run++) {
            lanes part[PARTS];
            for (int k = 0; k < PARTS; k++) {
                int sub = subs * run + (subs == 2 && k >= PARTS / 2);
                part[k] = part_of_run(kind, block, run, k) * spread(f.scale, sub);
                if (has_min(kind)) part[k] -= spread(f.min, sub);
            }
            const long to = RUN * (runs * i + run);
#ifdef __AVX512BF16__ /* which takes subnormal numbers for zero: only MXFP4 has them, as other scales are float16 */
            if (half && kind != MXFP4) {
                _mm512_storeu_si512((uint16_t *)y + to, (__m512i)_mm512_cvtne2ps_pbh((__m512)part[1], (__m512)part[0]));
                continue;
            }
#endif
            for (int k = 0; k < PARTS; k++) store_as(half, y, to + LANES * k, part[k]);
        }
    }
}

#define DECODE(KIND) \
    static void decode_##KIND(const void *codes, long first, long n, int half, void *y) { \
        decode_blocks(KIND, codes, first, n, half, y); \
    }
EACH_TYPE(DECODE)

SPECIALISED void decode_table(
    enum kind kind, const fields *f, enum way way, long first, long n, int half, void *y) {
    const shared *table = (const shared *)f->scales;
    const float *d = (const float *)f->d, *more = (const float *)f->more;
    for (long i = 0; i < n; i++) {
        lanes part[PARTS];
        table_run(kind, f, way, first + i, 0, part);
        for (int k = 0; k < PARTS; k++) {
            long g = table->runs ? (first + i) / table->runs : 2 * (first + i) + (k >= PARTS / 2);
            if (table->offset == ZERO) part[k] -= splat(more[g]);
            part[k] *= splat(d[g] * unit_of(way));
            if (table->offset == MINIMUM) part[k] += splat(more[g]);
            if (table->factor != 1) part[k] *= splat(table->factor);
            if (table->divisor != 1) part[k] /= splat(table->divisor);
            store_as(half, y, RUN * i + LANES * k, part[k]);
        }
    }
}

static void decode_eight(const fields *f, long first, long n, int half, void *y) {
    switch (((const shared *)f->scales)->way) {
    case SIGNED: decode_table(TABLE_8, f, SIGNED, first, n, half, y); break;
    case E4M3: decode_table(TABLE_8, f, E4M3, first, n, half, y); break;
    case EVEN: decode_table(TABLE_8, f, EVEN, first, n, half, y); break;
    default: decode_table(TABLE_8, f, LOOK_UP, first, n, half, y);
    }
}

void llorch_decode_runs(int kind, const void *codes, const void *d, const void *scales, const void *more, int half,
                        void *y, long first, long n) {
    const fields f = {codes, d, scales, more};
    switch (kind) {
    case F32: copy_as(0, (const float *)codes + RUN * first, half, y, RUN * n); break;
    case BF16: copy_as(1, (const uint16_t *)codes + RUN * first, half, y, RUN * n); break;
    case F16:
        for (long i = 0; i < RUN * n; i += LANES) store_as(half, y, i, widen_f16((const uint16_t *)codes + RUN * first + i));
        break;
#define CASE(KIND) case KIND: decode_##KIND(codes, first, n, half, y); break;
    EACH_TYPE(CASE)
#undef CASE
    case TABLE_4: decode_table(TABLE_4, &f, LOOK_UP, first, n, half, y); break;
    default: decode_eight(&f, first, n, half, y);
    }
}

void llorch_decode(int kind, const void *codes, const void *d, const void *scales, const void *more, int half,
                   void *y, long first, long n, long in) {
    long runs = in / RUN, bytes = in * (half ? 2 : 4);
#pragma omp parallel for schedule(static)
    for (long r = 0; r < n; r++)
        llorch_decode_runs(kind, codes, d, scales, more, half, (char *)y + r * bytes, (first + r) * runs, runs);
}
