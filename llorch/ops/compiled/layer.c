/* What a layer does beside its products: norm, rotation, cache, SwiGLU; attention is in attention.c.
 *
 * Each is one pass over its input; sums, rotations and exponentials are float32 and rounded once when the run is in
 * bfloat16 (half is not 0). The twins are the functions of llorch/pytorch/causal_lm.py and llorch/pytorch/cache.py. */

#include "layer.h"
#include "numbers.h"
#include <math.h>

enum { WORTH_THREADS = 1 << 14 };

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
    for (long i = 0; i < n / LANES * LANES; i += LANES) {
        lanes g = load_as(half, gate, i);
        store_as(half, y, i, g / (1.0f + exp_lanes(-g)) * load_as(half, up, i));
    }
    for (long i = n / LANES * LANES; i < n; i++) {
        float g = load_one(half, gate, i);
        store_one(half, y, i, g / (1.0f + exp_lanes(splat(-g))[0]) * load_one(half, up, i));
    }
}
