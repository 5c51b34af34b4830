/* The functions that Python calls, and that a whole block is made of. half is 1 for bfloat16, 0 for float32. */

#pragma once

#include <stdint.h>

/* y = x W^T + bias for a few rows and a packed matrix. 1 when memory is lacking. */
int llorch_product(int kind, const void *codes, const void *d, const void *scales, const void *more, int half,
                   const void *x, const void *bias, void *y, long rows, long out, long in);

/* The same for any number of rows and any matrix, with sums of one order: see fixed.c. */
int llorch_fixed_product(int kind, const void *codes, const void *d, const void *scales, const void *more, int half,
                         const void *x, const void *bias, void *y, long rows, long out, long in);

/* Runs of 32 elements of a packed matrix, counted over all rows. */
void llorch_decode_runs(int kind, const void *codes, const void *d, const void *scales, const void *more, int half,
                        void *y, long first, long n);

/* Rows first to first + n of a packed matrix. */
void llorch_decode(int kind, const void *codes, const void *d, const void *scales, const void *more, int half,
                   void *y, long first, long n, long in);

/* x / sqrt(mean(x * x) + eps) * weight over rows of x. */
void llorch_rms_norm(int half, const void *x, const void *weight, float eps, void *y, long rows, long width);

/* Pairs (j, j + half_dim) of every head turned by the angles of its token; what lies behind them stays. */
void llorch_rope(int half, const void *x, const float *cos, const float *sin, void *y, long tokens, long heads,
                 long half_dim, long head_dim);

/* New keys or values (batch, seq, kv_heads, n_bytes) into their slots of (batch, kv_heads, n_slots, n_bytes).
 * Returns 1, with nothing written, when a slot does not exist. */
int llorch_append(const char *new, char *store, const int64_t *slots, long batch, long seq, long kv_heads, long n_slots,
                  long n_bytes);

/* gate / (1 + exp(-gate)) * up. */
void llorch_swiglu(int half, const void *gate, const void *up, void *y, long n);

/* softmax(q k^T / sqrt(head_dim)) v. visible is (batch, seq, ctx), or null when a token sees what stands before it; pages
 * says which page of 64 slots comes when, (batch, pages of ctx), or is null when slots lie side by side. 1 when memory is
 * lacking. */
int llorch_attend(int half, const void *q, const void *keys, const void *values, const int64_t *pages,
                  const uint8_t *visible, void *y, long batch, long seq, long heads, long kv_heads, long ctx,
                  long head_dim, long batch_stride, long head_stride);
