/* Products of any number of rows whose sums have one order.
 *
 *     y = x W^T + bias        every sum in float32, rounded once when x is bfloat16
 *
 * The bits of a result depend on its row, its column of W^T and the processor: neither on the number of rows nor on that
 * of threads. A sum goes through CHUNK columns at a time, lane by lane; with AMX through 32 at a time. A packed matrix is
 * decoded to the dtype of x first, a few of its rows at a time, so it has the bits of the decoded one. */

#include "layer.h"
#include "numbers.h"
#include "tiles.h"

enum { DENSE_F32, DENSE_BF16 };
enum { CHUNK = 1024, ROWS = LANES == 16 ? 4 : 2, OUTS = LANES == 16 ? 6 : 4, KEPT = 1 << 20 };

typedef struct {
    int kind, half; /* half: x, bias and y are bfloat16 */
    const void *codes, *d, *scales, *more, *bias;
    const float *x; /* (rows, padded), zeros behind each row */
    float *sums;    /* (rows, out) */
    long rows, out, in, padded;
} product;

/* Rows first to first + n of the matrix, columns start to start + width, as float32 with zeros to a whole register. */
static void widen(const product *p, long first, long n, long start, long width, float *to) {
    for (long r = 0; r < n; r++) {
        float *row = to + r * CHUNK;
        void *narrow = p->half ? row + CHUNK / 2 : row; /* read before it is written over */
        long at = (first + r) * p->in + start;
        if (p->kind <= DENSE_BF16)
            for (long i = 0; i < width; i++) row[i] = load_one(p->kind == DENSE_BF16, p->codes, at + i);
        else llorch_decode_runs(p->kind, p->codes, p->d, p->scales, p->more, p->half, narrow, at / RUN, width / RUN);
        for (long i = 0; p->kind > DENSE_BF16 && p->half && i < width; i += LANES)
            store_as(0, row, i, load_as(1, narrow, i));
        for (long i = width; i % LANES; i++) row[i] = 0;
    }
}

/* Adds the products of some rows of W with some rows of x, n columns of each, to their sums. */
static inline __attribute__((always_inline)) void multiply(int half, const void *w, long stride, const float *x,
                                                           long x_stride, long n, int outs, int rows, float *sums,
                                                           long out, int begin) {
    lanes sum[OUTS * ROWS];
    for (int j = 0; j < outs * rows; j++) sum[j] = splat(0);
    for (long i = 0; i < n; i += LANES) {
        lanes inputs[ROWS];
        for (int r = 0; r < rows; r++) inputs[r] = load(x + r * x_stride + i);
        for (int o = 0; o < outs; o++) {
            lanes weights = load_as(half, w, o * stride + i);
            for (int r = 0; r < rows; r++) sum[o * rows + r] = fma_lanes(weights, inputs[r], sum[o * rows + r]);
        }
    }
    for (int o = 0; o < outs; o++)
        for (int r = 0; r < rows; r++)
            sums[r * out + o] = (begin ? 0 : sums[r * out + o]) + sum_of(sum[o * rows + r]);
}

static inline __attribute__((always_inline)) void some_rows(int half, const void *w, long stride, const float *x,
                                                            long x_stride, long n, int outs, long rows, float *sums,
                                                            long out, int begin) {
    long r = 0;
    for (; r + ROWS <= rows; r += ROWS)
        multiply(half, w, stride, x + r * x_stride, x_stride, n, outs, ROWS, sums + r * out, out, begin);
    for (; r < rows; r++)
        multiply(half, w, stride, x + r * x_stride, x_stride, n, outs, 1, sums + r * out, out, begin);
}

static inline __attribute__((always_inline)) void some_outs(int half, const void *w, long stride, const float *x,
                                                            long x_stride, long n, long outs, long rows, float *sums,
                                                            long out, int begin) {
    if (outs == OUTS) {
        some_rows(half, w, stride, x, x_stride, n, OUTS, rows, sums, out, begin);
        return;
    }
    for (long o = 0; o < outs; o++)
        some_rows(half, (const char *)w + o * stride * (half ? 2 : 4), stride, x, x_stride, n, 1, rows, sums + o, out,
                  begin);
}

/* Up to OUTS rows of the matrix from `first` on, columns start to end, with rows of x. */
static void add_products(const product *p, long first, long outs, long start, long end, long row, long rows,
                         float *room) {
    int direct = p->kind <= DENSE_BF16 && p->in % LANES == 0;
    for (long at = start; at < end; at += CHUNK) {
        long n = end - at < CHUNK ? end - at : CHUNK, padded = (n + LANES - 1) / LANES * LANES;
        const float *x = p->x + row * p->padded + at;
        float *sums = p->sums + row * p->out + first;
        if (direct && p->kind == DENSE_BF16) {
            const uint16_t *w = (const uint16_t *)p->codes + first * p->in + at;
            some_outs(1, w, p->in, x, p->padded, n, outs, rows, sums, p->out, at == 0);
        } else if (direct) {
            const float *w = (const float *)p->codes + first * p->in + at;
            some_outs(0, w, p->in, x, p->padded, n, outs, rows, sums, p->out, at == 0);
        } else {
            widen(p, first, outs, at, n, room);
            some_outs(0, room, CHUNK, x, p->padded, padded, outs, rows, sums, p->out, at == 0);
        }
    }
}

/* Inputs that stay in the nearer cache: some rows of CHUNK columns, or all columns of a few rows. */
static void add_all(const product *p) {
    long span = p->rows * p->in > KEPT / 4 ? CHUNK : p->in, block = p->rows;
    if (block > KEPT / 4 / CHUNK) block = KEPT / 4 / CHUNK;
    if (span < CHUNK) span = CHUNK;
#pragma omp parallel if (p->rows * p->out * p->in > 1 << 14)
    for (long row = 0; row < p->rows; row += block)
        for (long start = 0; start < p->in; start += span) {
            long rows = p->rows - row < block ? p->rows - row : block, end = start + span < p->in ? start + span : p->in;
            float room[OUTS * CHUNK];
#pragma omp for schedule(static) nowait
            for (long first = 0; first < p->out; first += OUTS) {
                long outs = p->out - first < OUTS ? p->out - first : OUTS;
                add_products(p, first, outs, start, end, row, rows, room);
            }
        }
}

static void finish(const product *p, void *y) {
#pragma omp parallel for schedule(static) if (p->rows * p->out > 1 << 14)
    for (long r = 0; r < p->rows; r++)
        for (long o = 0; o < p->out; o++) {
            float bias = p->bias ? load_one(p->half, p->bias, o) : 0;
            store_one(p->half, y, r * p->out + o, p->sums[r * p->out + o] + bias);
        }
}

int llorch_fixed_product(int kind, const void *codes, const void *d, const void *scales, const void *more, int half,
                         const void *x, const void *bias, void *y, long rows, long out, long in) {
    if (rows == 0) return 0;
    if (half && has_tiles()) return multiply_tiles(kind, codes, d, scales, more, x, bias, y, rows, out, in);
    long padded = (in + LANES - 1) / LANES * LANES;
    int copied = half || padded != in;
    float *wide = copied ? malloc(sizeof(float) * (size_t)(rows * (padded + (half ? out : 0)))) : NULL;
    if (copied && !wide) return 1;
    float *sums = half ? wide + rows * padded : y;
    const product p = {kind, half, codes, d, scales, more, bias, copied ? wide : x, sums, rows, out, in, padded};
    for (long r = 0; copied && r < rows; r++) {
        for (long i = 0; i < in; i++) wide[r * padded + i] = load_one(half, x, r * in + i);
        for (long i = in; i < padded; i++) wide[r * padded + i] = 0;
    }
    add_all(&p);
    if (half || bias) finish(&p, y);
    free(wide);
    return 0;
}
