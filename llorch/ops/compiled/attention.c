/* softmax(q k^T / sqrt(head_dim)) v of any number of tokens, in float32, rounded once when the run is in bfloat16.
 *
 * Heads that share keys, and tokens side by side, are rows of one job: keys and values are read once for all of them. A
 * row depends on nothing else: scores are sums over lanes of head_dim, sums of powers go slot by slot through the lanes,
 * sums of values slot by slot; slots that it does not see add exact zeros. Keys and values of a sequence may lie in pages
 * of KEYS slots, which are read where they are. */

#include "layer.h"
#include "numbers.h"
#include <math.h>

enum { KEYS = 64, MOST = 16, ROWS = 4, PARTS = LANES == 16 ? 4 : 2 };

typedef struct {
    const void *q, *keys, *values;
    const int64_t *pages;   /* (batch, pages of ctx), or null: slots lie side by side */
    const uint8_t *visible; /* (batch, seq, ctx), or null: a token sees what stands before it */
    void *y;
    int half;
    long seq, heads, kv_heads, ctx, dim, padded; /* padded: to a whole number of lanes */
    long batch_stride, head_stride;              /* of keys and values, in elements */
} call;

typedef struct {
    float *query, *block, *context; /* (MOST, padded), (KEYS, padded), (MOST, padded) */
    float *scores;                  /* (MOST, slots) */
    long slots;
} room;

/* Where row `row` of a job's sequence and key head has its token and head: those of a token side by side. */
static long place_of(const call *c, long b, long kv_head, long row) {
    long group = c->heads / c->kv_heads;
    return ((b * c->seq + row / group) * c->heads + kv_head * group + row % group) * c->dim;
}

/* Where a block of slots of a sequence begins in its store. */
static long begin_of(const call *c, long b, long slot) {
    long n_pages = (c->ctx + KEYS - 1) / KEYS;
    return c->pages ? c->pages[b * n_pages + slot / KEYS] * KEYS : slot;
}

/* Some slots of keys or values, of one block, as rows of whole lanes: in place where they are such, else a copy. */
static const float *lanes_of(const call *c, const void *store, long b, long kv_head, long slot, long n, float *block) {
    long at = b * c->batch_stride + kv_head * c->head_stride + begin_of(c, b, slot) * c->dim;
    if (!c->half && c->padded == c->dim) return (const float *)store + at;
    for (long i = 0; i < n; i++) {
        long j = 0;
        for (; j + LANES <= c->dim; j += LANES) store_as(0, block, i * c->padded + j, load_as(c->half, store, at + i * c->dim + j));
        for (; j < c->dim; j++) block[i * c->padded + j] = load_one(c->half, store, at + i * c->dim + j);
    }
    return block;
}

static inline __attribute__((always_inline)) void score(
    const float *q, const float *keys, long dim, int rows, int n, float *scores, long slots) {
    lanes sums[ROWS * PARTS];
    for (int j = 0; j < rows * n; j++) sums[j] = splat(0);
    for (long i = 0; i < dim; i += LANES)
        for (int k = 0; k < n; k++) {
            lanes key = load(keys + k * dim + i);
            for (int r = 0; r < rows; r++) sums[r * n + k] = fma_lanes(load(q + r * dim + i), key, sums[r * n + k]);
        }
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < n; k++) scores[r * slots + k] = sum_of(sums[r * n + k]);
}

static inline __attribute__((always_inline)) void score_block(
    const float *q, const float *keys, long dim, int rows, long n, float *scores, long slots) {
    long k = 0;
    for (; k + PARTS <= n; k += PARTS) score(q, keys + k * dim, dim, rows, PARTS, scores + k, slots);
    for (; k < n; k++) score(q, keys + k * dim, dim, rows, 1, scores + k, slots);
}

/* Adds the values of n slots, each times its weight, to the context; `parts` registers of it. */
static inline __attribute__((always_inline)) void mix(
    const float *weights, long slots, const float *values, long dim, int rows, int parts, long n, float *context) {
    lanes sums[ROWS * PARTS];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < parts; j++) sums[r * parts + j] = load(context + r * dim + j * LANES);
    for (long k = 0; k < n; k++)
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < parts; j++)
                sums[r * parts + j] =
                    fma_lanes(splat(weights[r * slots + k]), load(values + k * dim + j * LANES), sums[r * parts + j]);
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < parts; j++) store_as(0, context, r * dim + j * LANES, sums[r * parts + j]);
}

static inline __attribute__((always_inline)) void mix_block(
    const float *weights, long slots, const float *values, long dim, int rows, long n, float *context) {
    long j = 0;
    for (; j + PARTS * LANES <= dim; j += PARTS * LANES)
        mix(weights, slots, values + j, dim, rows, PARTS, n, context + j);
    for (; j < dim; j += LANES) mix(weights, slots, values + j, dim, rows, 1, n, context + j);
}

/* How many slots the rows up to `last` of a job may see. */
static long seen_by(const call *c, long last) {
    return c->visible ? c->ctx : c->ctx - c->seq + last / (c->heads / c->kv_heads) + 1;
}

/* Powers of e in place of the scores of one row; gives the inverse of their sum. */
static float weigh(const call *c, long b, long row, long seen, float *scores, long slots) {
    long group = c->heads / c->kv_heads, own = seen_by(c, row);
    const uint8_t *visible = c->visible ? c->visible + (b * c->seq + row / group) * c->ctx : NULL;
    for (long i = 0; i < seen; i++)
        if (visible ? !visible[i] : i >= own) scores[i] = -INFINITY;
    for (long i = seen; i < slots; i++) scores[i] = -INFINITY;
    float greatest = -INFINITY;
    for (long i = 0; i < seen; i++)
        if (scores[i] > greatest) greatest = scores[i];
    lanes total = {0};
    for (long i = 0; i < slots; i += LANES) {
        lanes power = exp_lanes(load(scores + i) - greatest);
        store_as(0, scores, i, power);
        total += power;
    }
    return 1.0f / sum_of(total);
}

/* Rows `first` to `first` + n of a sequence and key head. */
static void attend_rows(const call *c, const room *at, long b, long kv_head, long first, long n) {
    long dim = c->padded, seen = seen_by(c, first + n - 1), slots = (seen + LANES - 1) / LANES * LANES;
    float scale = 1.0f / sqrtf((float)c->dim), inverse[MOST];
    for (long r = 0; r < n; r++)
        for (long j = 0; j < c->dim; j++)
            at->query[r * dim + j] = load_one(c->half, c->q, place_of(c, b, kv_head, first + r) + j) * scale;
    for (long slot = 0; slot < seen; slot += KEYS) {
        long keys = seen - slot < KEYS ? seen - slot : KEYS, r = 0;
        const float *block = lanes_of(c, c->keys, b, kv_head, slot, keys, at->block);
        for (; r + ROWS <= n; r += ROWS)
            score_block(at->query + r * dim, block, dim, ROWS, keys, at->scores + r * at->slots + slot, at->slots);
        for (; r < n; r++)
            score_block(at->query + r * dim, block, dim, 1, keys, at->scores + r * at->slots + slot, at->slots);
    }
    for (long r = 0; r < n; r++) inverse[r] = weigh(c, b, first + r, seen, at->scores + r * at->slots, slots);
    memset(at->context, 0, sizeof(float) * (size_t)(n * dim));
    for (long slot = 0; slot < seen; slot += KEYS) {
        long keys = seen - slot < KEYS ? seen - slot : KEYS, r = 0;
        const float *block = lanes_of(c, c->values, b, kv_head, slot, keys, at->block), *weights = at->scores + slot;
        for (; r + ROWS <= n; r += ROWS)
            mix_block(weights + r * at->slots, at->slots, block, dim, ROWS, keys, at->context + r * dim);
        for (; r < n; r++) mix_block(weights + r * at->slots, at->slots, block, dim, 1, keys, at->context + r * dim);
    }
    for (long r = 0; r < n; r++)
        for (long j = 0; j < c->dim; j++) /* + 0: a zero has no sign, whichever weights were too small */
            store_one(c->half, c->y, place_of(c, b, kv_head, first + r) + j, at->context[r * dim + j] * inverse[r] + 0.0f);
}

int llorch_attend(int half, const void *q, const void *keys, const void *values, const int64_t *pages,
                  const uint8_t *visible, void *y, long batch, long seq, long heads, long kv_heads, long ctx,
                  long head_dim, long batch_stride, long head_stride) {
    long padded = (head_dim + LANES - 1) / LANES * LANES, slots = (ctx + KEYS - 1) / KEYS * KEYS;
    const call c = {q, keys, values, pages, visible, y, half, seq, heads, kv_heads, ctx, head_dim, padded, batch_stride, head_stride};
    long all = seq * (heads / kv_heads), size = all > MOST ? MOST : all > ROWS ? ROWS : all;
    long jobs = (all + size - 1) / size;
    int lacking = 0;
#pragma omp parallel reduction(| : lacking)
    {
        float *memory = calloc((size_t)((2 * MOST + KEYS) * padded + MOST * slots), sizeof(float));
        const room at = {memory, memory + MOST * padded, memory + (MOST + KEYS) * padded,
                         memory + (2 * MOST + KEYS) * padded, slots};
        lacking |= memory == NULL;
#pragma omp for schedule(static)
        for (long i = 0; i < batch * kv_heads * jobs; i++) {
            long first = i % jobs * size, n = all - first < size ? all - first : size;
            if (memory) attend_rows(&c, &at, i / jobs / kv_heads, i / jobs % kv_heads, first, n);
        }
        free(memory);
    }
    return lacking;
}
