/* What a delta net does beside its products: convolution, L2 norm, the delta rule, gated norm.
 *
 * The twins are in llorch/pytorch/models/delta_net.py and delta_rule.py. A column of a state is written and read by itself, so
 * some columns of a head go through all tokens while they stay in the nearest cache. Sums have one order, whatever
 * the number of tokens, of sequences and of threads: passes of any length give the same bits. */

#include "numbers.h"
#include <math.h>

enum { PARTS = 4, BLOCK = PARTS * LANES, MOST_KEYS = 256, MOST_TAPS = 16, CHANNELS = 512 };

static inline lanes silu_lanes(lanes x) {
    return x / (1.0f + exp_lanes(-x));
}

/* Some channels of one sequence; rows points to the last real inputs, the oldest first. */
static void convolve(int half, const char *x, const char *before, const uint8_t *real, const float *weight, char *y,
                     char *after, long seq, long width, long taps, long first, long last) {
    long element = half ? 2 : 4, row = width * element;
    const char *rows[MOST_TAPS + 1];
    for (long j = 0; j < taps; j++) rows[j] = before + j * row;
    for (long t = 0; t < seq; t++) {
        if (real && !real[t]) {
            memset(y + t * row + first * element, 0, (size_t)((last - first) * element));
            continue;
        }
        rows[taps] = x + t * row;
        long c = first;
        for (; c + LANES <= last; c += LANES) {
            lanes sum = {0};
            for (long j = 0; j <= taps; j++) sum += load_as(half, rows[j], c) * load(weight + j * width + c);
            store_as(half, y + t * row, c, silu_lanes(sum));
        }
        for (; c < last; c++) {
            float sum = 0;
            for (long j = 0; j <= taps; j++) sum += load_one(half, rows[j], c) * weight[j * width + c];
            store_one(half, y + t * row, c, silu_lanes(splat(sum))[0]);
        }
        for (long j = 0; j < taps; j++) rows[j] = rows[j + 1];
    }
    for (long j = 0; j < taps; j++)
        memcpy(after + j * row + first * element, rows[j] + first * element, (size_t)((last - first) * element));
}

/* real is (batch, seq), or null when there is no padding; weight is (taps + 1, width); taps is at most MOST_TAPS. */
void llorch_short_conv(int half, const char *x, const char *before, const uint8_t *real, const float *weight, char *y,
                       char *after, long batch, long seq, long width, long taps) {
    long parts = (width + CHANNELS - 1) / CHANNELS, row = width * (half ? 2 : 4);
#pragma omp parallel for schedule(static) if (batch * seq * width > 1 << 14)
    for (long i = 0; i < batch * parts; i++) {
        long b = i / parts, first = i % parts * CHANNELS, last = first + CHANNELS < width ? first + CHANNELS : width;
        convolve(half, x + b * seq * row, before + b * taps * row, real ? real + b * seq : NULL, weight,
                 y + b * seq * row, after + b * taps * row, seq, width, taps, first, last);
    }
}

void llorch_l2_norm(const float *x, float *y, long tokens, long stride, long heads, long dim) {
#pragma omp parallel for schedule(static) if (tokens * heads * dim > 1 << 14)
    for (long r = 0; r < tokens * heads; r++) {
        const float *from = x + r / heads * stride + r % heads * dim;
        float factor = 1.0f / sqrtf(dot_f32(from, from, dim) + 1e-6f);
        for (long j = 0; j < dim; j++) y[r * dim + j] = from[j] * factor;
    }
}

typedef struct {
    const float *q, *k, *v, *beta, *log_decay;
    float *state, *out;
    long seq, k_heads, v_heads, key_dim, value_dim, v_stride; /* floats from a token's values to the next one's */
} rule;

static inline lanes scaled(float x, lanes y, lanes sum) {
    return fma_lanes(splat(x), y, sum);
}

/* Columns first to first + n, at most BLOCK, of one head of one sequence. */
static void follow(const rule *a, long b, long h, long first, long n) {
    long dim = a->key_dim, width = a->value_dim;
    float *kept = a->state + (b * a->v_heads + h) * dim * width + first, scale = 1.0f / sqrtf((float)dim);
    lanes s[MOST_KEYS][PARTS];
    for (long j = 0; j < dim; j++) {
        memset(s[j], 0, sizeof s[j]);
        memcpy(s[j], kept + j * width, sizeof(float) * (size_t)n);
    }
    for (long t = b * a->seq; t < (b + 1) * a->seq; t++) {
        long head = (t * a->k_heads + h / (a->v_heads / a->k_heads)) * dim, at = t * a->v_heads + h;
        const float *q = a->q + head, *k = a->k + head;
        float decay = expf(a->log_decay[at]), beta = a->beta[at];
        lanes seen[PARTS] = {{0}}, out[PARTS] = {{0}}, delta[PARTS] = {{0}};
        for (long j = 0; j < dim; j++)
            for (int i = 0; i < PARTS; i++) seen[i] = scaled(k[j], s[j][i], seen[i]);
        memcpy(delta, a->v + t * a->v_stride + h * width + first, sizeof(float) * (size_t)n);
        for (int i = 0; i < PARTS; i++) delta[i] = beta * (delta[i] - decay * seen[i]);
        for (long j = 0; j < dim; j++)
            for (int i = 0; i < PARTS; i++) {
                s[j][i] = scaled(k[j], delta[i], decay * s[j][i]);
                out[i] = scaled(q[j], s[j][i], out[i]);
            }
        for (int i = 0; i < PARTS; i++) out[i] *= scale;
        memcpy(a->out + at * width + first, out, sizeof(float) * (size_t)n);
    }
    for (long j = 0; j < dim; j++) memcpy(kept + j * width, s[j], sizeof(float) * (size_t)n);
}

/* key_dim is at most MOST_KEYS. */
void llorch_delta_rule(const float *q, const float *k, const float *v, const float *beta, const float *log_decay,
                       float *state, float *out, long batch, long seq, long k_heads, long v_heads, long key_dim,
                       long value_dim, long v_stride) {
    const rule a = {q, k, v, beta, log_decay, state, out, seq, k_heads, v_heads, key_dim, value_dim, v_stride};
    long blocks = (value_dim + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static)
    for (long i = 0; i < batch * v_heads * blocks; i++) {
        long first = i % blocks * BLOCK, n = value_dim - first < BLOCK ? value_dim - first : BLOCK;
        follow(&a, i / blocks / v_heads, i / blocks % v_heads, first, n);
    }
}

void llorch_gated_norm(int half, const float *x, const void *z, const void *weight, float eps, void *y, long rows,
                       long width) {
#pragma omp parallel for schedule(static) if (rows * width > 1 << 14)
    for (long r = 0; r < rows; r++) {
        const float *from = x + r * width;
        float factor = 1.0f / sqrtf(dot_f32(from, from, width) / (float)width + eps);
        long i = 0;
        for (; i + LANES <= width; i += LANES)
            store_as(half, y, r * width + i,
                     load(from + i) * factor * load_as(half, weight, i) * silu_lanes(load_as(half, z, r * width + i)));
        for (; i < width; i++) {
            float gate = silu_lanes(splat(load_one(half, z, r * width + i)))[0];
            store_one(half, y, r * width + i, from[i] * factor * load_one(half, weight, i) * gate);
        }
    }
}
