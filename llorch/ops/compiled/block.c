/* A whole block for a few tokens in one call: the functions that its leaves call one by one, in the same order, so that
 * the result has the same bits. What it saves is the way from one to the next. */

#include "layer.h"
#include "numbers.h"

typedef struct {
    const void *codes, *d, *scales, *more, *bias;
    long kind, out, in;
} matrix;

typedef struct {
    const void *attention_norm, *ffn_norm, *q_norm, *k_norm; /* the last two may be null */
    matrix q, k, v, o, gate, up, down;
    long half, fixed, heads, kv_heads, head_dim; /* fixed: products with sums of one order */
    float eps;
} block;

typedef struct {
    const float *cos, *sin;
    const int64_t *slots;
    const uint8_t *visible; /* or null */
    const int64_t *pages;   /* or null: then each sequence has a row of keys and values, else all have one */
    char *keys, *values;
    long batch, seq, ctx, n_slots;
} place;

static int multiply(const block *b, const matrix *m, const void *x, void *y, long rows) {
    int dense = m->kind == (int)b->half; /* in the dtype of x: float32 is kind 0, bfloat16 kind 1 */
    return (b->fixed || (dense && rows > 1) ? llorch_fixed_product : llorch_product)(
        (int)m->kind, m->codes, m->d, m->scales, m->more, (int)b->half, x, m->bias, y, rows, m->out, m->in);
}

static void add(int half, const void *x, const void *more, void *y, long n) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) store_as(half, y, i, load_as(half, x, i) + load_as(half, more, i));
    for (; i < n; i++) store_one(half, y, i, load_one(half, x, i) + load_one(half, more, i));
}

static int attend(const block *b, const place *p, const char *h, char *room, char *out, long element) {
    int half = (int)b->half;
    long rows = p->batch * p->seq, dim = b->head_dim, stride = p->n_slots * dim, stores = p->pages ? 1 : p->batch;
    char *q = room, *k = q + rows * b->q.out * element, *v = k + rows * b->k.out * element;
    char *turned = v + rows * b->v.out * element;
    if (multiply(b, &b->q, h, q, rows) || multiply(b, &b->k, h, k, rows) || multiply(b, &b->v, h, v, rows)) return 1;
    if (b->q_norm) {
        llorch_rms_norm(half, q, b->q_norm, b->eps, q, rows * b->heads, dim);
        llorch_rms_norm(half, k, b->k_norm, b->eps, k, rows * b->kv_heads, dim);
    }
    llorch_rope(half, q, p->cos, p->sin, turned, rows, b->heads, dim / 2, dim);
    llorch_rope(half, k, p->cos, p->sin, q, rows, b->kv_heads, dim / 2, dim); /* q is free by now */
    if (llorch_append(q, p->keys, p->slots, stores, rows / stores, b->kv_heads, p->n_slots, dim * element)) return 2;
    if (llorch_append(v, p->values, p->slots, stores, rows / stores, b->kv_heads, p->n_slots, dim * element)) return 2;
    if (llorch_attend(half, turned, p->keys, p->values, p->pages, p->visible, q, p->batch, p->seq, b->heads, b->kv_heads,
                      p->ctx, dim, p->pages ? 0 : b->kv_heads * stride, stride))
        return 1;
    return multiply(b, &b->o, q, out, rows);
}

static int feed_forward(const block *b, const char *h, char *room, char *out, long rows, long element) {
    char *gate = room, *up = gate + rows * b->gate.out * element;
    if (multiply(b, &b->gate, h, gate, rows) || multiply(b, &b->up, h, up, rows)) return 1;
    llorch_swiglu((int)b->half, gate, up, gate, rows * b->gate.out);
    return multiply(b, &b->down, gate, out, rows);
}

/* The residual stream after the block. Returns 1 when memory is lacking, 2 when a slot does not exist. */
int llorch_block(const block *b, const place *p, const void *x, void *y) {
    int half = (int)b->half, failed;
    long rows = p->batch * p->seq, hidden = b->q.in, element = half ? 2 : 4, n = rows * hidden;
    long room_for = 2 * b->q.out + b->k.out + b->v.out + 2 * b->gate.out + 2 * hidden;
    char *h = malloc((size_t)(rows * room_for * element)), *more = h + n * element, *room = more + n * element;
    if (!h) return 1;
    llorch_rms_norm(half, x, b->attention_norm, b->eps, h, rows, hidden);
    failed = attend(b, p, h, room, more, element);
    if (!failed) {
        add(half, x, more, y, n);
        llorch_rms_norm(half, y, b->ffn_norm, b->eps, h, rows, hidden);
        failed = feed_forward(b, h, room, more, rows, element);
        add(half, y, more, y, n);
    }
    free(h);
    return failed;
}
