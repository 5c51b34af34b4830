/* What a layer does beside its products: norm, rotation, cache, attention of a few tokens, SwiGLU.
 *
 * Each is one pass over its input; sums, rotations and exponentials are float32 and rounded once when the run is in
 * bfloat16 (half is not 0). The twins are the functions of llorch/pytorch/causal_lm.py and llorch/pytorch/cache.py. */

#include "cpu_layer.h"
#include "cpu_numbers.h"
#include <math.h>

enum { WORTH_THREADS = 1 << 14, MOST_DIM = 256 };

void llorch_rms_norm(int half, const void *x, const void *weight, float eps, void *y, long rows, long width) {
#pragma omp parallel for schedule(static) if (rows * width > WORTH_THREADS)
    for (long r = 0; r < rows; r++) {
        lanes squares = {0};
        long i = 0;
        for (; i + LANES <= width; i += LANES) {
            lanes v = load_as(half, x, r * width + i);
            squares = fma_lanes(v, v, squares);
        }
        float sum = sum_of(squares);
        for (; i < width; i++) sum += load_one(half, x, r * width + i) * load_one(half, x, r * width + i);
        float factor = 1.0f / sqrtf(sum / (float)width + eps);
        for (i = 0; i + LANES <= width; i += LANES)
            store_as(half, y, r * width + i, load_as(half, x, r * width + i) * factor * load_as(half, weight, i));
        for (; i < width; i++)
            store_one(half, y, r * width + i, load_one(half, x, r * width + i) * factor * load_one(half, weight, i));
    }
}

void llorch_rope(int half, const void *x, const float *cos, const float *sin, void *y, long tokens, long heads,
                 long half_dim, long dim) {
#pragma omp parallel for schedule(static) if (tokens * heads * half_dim > WORTH_THREADS)
    for (long t = 0; t < tokens; t++)
        for (long h = 0; h < heads; h++) {
            long start = (t * heads + h) * dim;
            for (long j = 0; j < half_dim; j++) {
                long first = start + j, second = first + half_dim;
                float a = load_one(half, x, first), b = load_one(half, x, second);
                float c = cos[t * half_dim + j], s = sin[t * half_dim + j];
                store_one(half, y, first, a * c - b * s);
                store_one(half, y, second, b * c + a * s);
            }
            for (long j = start + 2 * half_dim; j < start + dim; j++) store_one(half, y, j, load_one(half, x, j));
        }
}

int llorch_append(const char *new, char *store, const int64_t *slots, long batch, long seq, long kv_heads, long n_slots,
                  long n_bytes) {
    for (long i = 0; i < batch * seq; i++)
        if (slots[i] < 0 || slots[i] >= n_slots) return 1;
    for (long b = 0; b < batch; b++)
        for (long t = 0; t < seq; t++)
            for (long h = 0; h < kv_heads; h++) {
                char *to = store + ((b * kv_heads + h) * n_slots + slots[b * seq + t]) * n_bytes;
                memcpy(to, new + ((b * seq + t) * kv_heads + h) * n_bytes, (size_t)n_bytes);
            }
    return 0;
}

void llorch_swiglu(int half, const void *gate, const void *up, void *y, long n) {
#pragma omp parallel for schedule(static) if (n > WORTH_THREADS)
    for (long i = 0; i < n; i += LANES) {
        lanes g = load_as(half, gate, i);
        store_as(half, y, i, g / (1.0f + exp_lanes(-g)) * load_as(half, up, i));
    }
}

typedef struct {
    const void *keys, *values;
    const uint8_t *visible; /* (batch, seq, ctx), or null: a token sees what stands before it */
    long seq, heads, kv_heads, ctx, head_dim, batch_stride, head_stride; /* strides of keys and values, in elements */
} context;

/* One head of one token: softmax of the scaled scores over what it sees, times the values. */
static void attend_one(int half, const context *c, const void *q, void *y, long token, long h, float *room) {
    long dim = c->head_dim, b = token / c->seq, seen = c->visible ? c->ctx : c->ctx - c->seq + token % c->seq + 1;
    long at = (token * c->heads + h) * dim, padded = (seen + LANES - 1) / LANES * LANES;
    long base = b * c->batch_stride + h / (c->heads / c->kv_heads) * c->head_stride;
    float *query = room, *weights = room + dim, greatest = -INFINITY, scale = 1.0f / sqrtf((float)dim);
    for (long j = 0; j < dim; j++) query[j] = load_one(half, q, at + j) * scale;
    for (long i = 0; i < padded; i++) {
        if (i >= seen || (c->visible && !c->visible[token * c->ctx + i])) {
            weights[i] = -INFINITY;
            continue;
        }
        long key = base + i * dim;
        weights[i] = half ? dot_bf16((const uint16_t *)c->keys + key, query, dim)
                          : dot_f32((const float *)c->keys + key, query, dim);
        if (weights[i] > greatest) greatest = weights[i];
    }
    lanes total = {0}, sums[MOST_DIM / LANES] = {{0}};
    for (long i = 0; i < padded; i += LANES) {
        lanes e = exp_lanes(load(weights + i) - greatest);
        memcpy(weights + i, &e, sizeof e);
        total += e;
    }
    for (long i = 0; i < seen; i++)
        for (long j = 0; j < dim / LANES; j++)
            sums[j] = fma_lanes(splat(weights[i]), load_as(half, c->values, base + i * dim + j * LANES), sums[j]);
    float norm = 1.0f / sum_of(total);
    for (long j = 0; j < dim; j++) store_one(half, y, at + j, sums[j / LANES][j % LANES] * norm);
}

int llorch_attend(int half, const void *q, const void *keys, const void *values, const uint8_t *visible, void *y,
                  long batch, long seq, long heads, long kv_heads, long ctx, long head_dim, long batch_stride,
                  long head_stride) {
    const context c = {keys, values, visible, seq, heads, kv_heads, ctx, head_dim, batch_stride, head_stride};
    int lacking = 0;
#pragma omp parallel for schedule(static) reduction(| : lacking)
    for (long i = 0; i < batch * seq * heads; i++) {
        float *room = malloc(sizeof(float) * (size_t)(head_dim + ctx + LANES));
        lacking |= room == NULL;
        if (room) attend_one(half, &c, q, y, i / heads, i % heads, room);
        free(room);
    }
    return lacking;
}
