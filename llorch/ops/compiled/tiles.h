/* Products in bfloat16 by AMX: rows of W are one operand as they lie, pairs of columns of x the other one.
 *
 * A tile adds 32 columns at a time to each of its sums, in one order wherever a row stands in it and however many rows
 * it has. Only here is the matrix hardware asked for by name; elsewhere, and where the system does not grant it, bfloat16
 * is widened (`fixed.c`), which rounds otherwise. */

#pragma once

#include "layer.h"
#include "numbers.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

enum { SIDE = 16, TILE = SIDE * SIDE, STEP = 32, TALL = 2 * SIDE, NEAR = 512, HELD = 1 << 20 };

/* Whether the system grants the tiles, which it has to be asked for once. */
static int has_tiles(void) {
    static int granted = -1;
    if (granted < 0) granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0; /* ARCH_REQ_XCOMP_PERM, tile data */
    return granted;
}

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_shapes;

/* Tiles 0 to 3 are sums, 4 and 5 rows of W, 6 and 7 pairs of columns of `n` rows of x. */
static void shape_tiles(long n) {
    tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.rows[i] = SIDE;
        shapes.bytes[i] = (uint16_t)(i == 4 || i == 5 ? 64 : 4 * n);
    }
    _tile_loadconfig(&shapes);
}

static inline __attribute__((always_inline)) void transpose(__m512 *rows) {
    for (int s = 1; s < SIDE; s *= 2) {
        int low[SIDE], high[SIDE];
        for (int i = 0; i < SIDE; i++) {
            low[i] = i & s ? SIDE + (i ^ s) : i;
            high[i] = i & s ? SIDE + i : i + s;
        }
        __m512i from = _mm512_loadu_si512(low), to = _mm512_loadu_si512(high);
        for (int i = 0; i < SIDE; i++) {
            if (i & s) continue;
            __m512 a = rows[i], b = rows[i | s];
            rows[i] = _mm512_permutex2var_ps(a, from, b);
            rows[i | s] = _mm512_permutex2var_ps(a, to, b);
        }
    }
}

/* `n` rows of x, at most SIDE, as pairs of columns (padded / 2, n); zeros beyond the rows and columns there are. */
static void pair_up(const uint16_t *x, long rows, long n, long in, long padded, uint32_t *to) {
    long pair = 0;
    for (; n == SIDE && rows == SIDE && 2 * pair + STEP <= in; pair += SIDE) {
        __m512 tile[SIDE];
        for (int r = 0; r < SIDE; r++) tile[r] = _mm512_loadu_ps((const float *)(const void *)(x + r * in + 2 * pair));
        transpose(tile);
        for (int r = 0; r < SIDE; r++) _mm512_storeu_ps((float *)(void *)(to + (pair + r) * n), tile[r]);
    }
    for (; pair < padded / 2; pair++)
        for (long r = 0; r < n; r++) {
            uint32_t first = r < rows && 2 * pair < in ? x[r * in + 2 * pair] : 0;
            uint32_t second = r < rows && 2 * pair + 1 < in ? x[r * in + 2 * pair + 1] : 0;
            to[pair * n + r] = first | second << 16;
        }
}

typedef struct {
    int kind;
    const void *codes, *d, *scales, *more;
    const uint16_t *bias;
    uint16_t *y;
    uint32_t *pairs; /* blocks of n rows */
    long rows, n, out, in, padded;
} tiled;

/* Columns start to end of TALL rows of W: as they lie where that is possible, else decoded or copied, zeros around. */
static const uint16_t *part_of(const tiled *t, long first, long start, long end, uint16_t *room, long *stride) {
    long n = t->out - first < TALL ? t->out - first : TALL, width = (end < t->in ? end : t->in) - start;
    *stride = t->in;
    if (t->kind == 1 && n == TALL && end <= t->in) return (const uint16_t *)t->codes + first * t->in + start;
    *stride = end - start;
    if (n < TALL || end > t->in) memset(room, 0, sizeof(uint16_t) * (size_t)(TALL * (end - start)));
    for (long r = 0; r < n; r++) {
        uint16_t *to = room + r * (end - start);
        long from = (first + r) * t->in + start;
        if (t->kind == 1) memcpy(to, (const uint16_t *)t->codes + from, sizeof(uint16_t) * (size_t)width);
        else llorch_decode_runs(t->kind, t->codes, t->d, t->scales, t->more, 1, to, from / RUN, width / RUN);
    }
    return room;
}

/* Writes sums (SIDE outs, n rows) as some rows of y. */
static void round_tile(const tiled *t, const float *sums, long first, long row, long rows) {
    long outs = t->out - first < SIDE ? t->out - first : SIDE;
    if (outs <= 0) return;
    __m512 by_row[SIDE], bias = _mm512_setzero_ps();
    __mmask16 there = (__mmask16)((1u << outs) - 1);
    for (long o = 0; o < SIDE; o++) by_row[o] = _mm512_maskz_loadu_ps((__mmask16)((1u << t->n) - 1), sums + o * t->n);
    transpose(by_row);
    if (t->bias) bias = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, t->bias + first)), 16));
    for (long r = 0; r < rows; r++) {
        __m256i rounded = (__m256i)_mm512_cvtneps_pbh(by_row[r] + bias);
        _mm256_mask_storeu_epi16(t->y + (row + r) * t->out + first, there, rounded);
    }
}

static void take_up(const float *sums, long bytes, int begin) {
    if (begin) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        return;
    }
    _tile_loadd(0, sums, bytes);
    _tile_loadd(1, sums + TILE, bytes);
    _tile_loadd(2, sums + 2 * TILE, bytes);
    _tile_loadd(3, sums + 3 * TILE, bytes);
}

static void put_down(float *sums, long bytes) {
    _tile_stored(0, sums, bytes);
    _tile_stored(1, sums + TILE, bytes);
    _tile_stored(2, sums + 2 * TILE, bytes);
    _tile_stored(3, sums + 3 * TILE, bytes);
}

/* Adds the products of columns start to end, of one block of rows or of two, with TALL rows of W. */
static void add_columns(const tiled *t, const uint16_t *w, long stride, long block, int wide, long start, long end) {
    const uint32_t *x = t->pairs + block * t->n * t->padded / 2, *next = x + t->n * t->padded / 2;
    for (long i = start; i < end; i += STEP, w += STEP) {
        _tile_loadd(4, w, 2 * stride);
        _tile_loadd(5, w + SIDE * stride, 2 * stride);
        _tile_loadd(6, x + i / 2 * t->n, 4 * t->n);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (!wide) continue;
        _tile_loadd(7, next + i / 2 * t->n, 4 * t->n);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
}

/* TALL rows of W with blocks begin to end: some columns of W at a time, which stay in the nearest cache. */
static void multiply_blocks(const tiled *t, long first, long begin, long end, uint16_t *room, float *sums) {
    for (long start = 0; start < t->padded; start += NEAR) {
        long to = start + NEAR < t->padded ? start + NEAR : t->padded, stride;
        const uint16_t *w = part_of(t, first, start, to, room, &stride);
        for (long b = begin; b < end; b += 2) {
            float *own = sums + (b - begin) * 2 * TILE;
            take_up(own, 4 * t->n, start == 0);
            add_columns(t, w, stride, b, b + 1 < end, start, to);
            put_down(own, 4 * t->n);
        }
    }
    for (long b = begin; b < end; b++)
        for (long j = 0; j < 2; j++) {
            long row = b * t->n, left = t->rows - row;
            round_tile(t, sums + ((b - begin) * 2 + j) * TILE, first + j * SIDE, row, left < t->n ? left : t->n);
        }
}

static int multiply_tiles(int kind, const void *codes, const void *d, const void *scales, const void *more,
                          const uint16_t *x, const uint16_t *bias, uint16_t *y, long rows, long out, long in) {
    long n = rows < SIDE ? rows : SIDE, blocks = (rows + n - 1) / n, padded = (in + STEP - 1) / STEP * STEP;
    long group = HELD / (2 * n * padded) / 2 * 2, lacking = 0;
    if (group > blocks) group = blocks;
    if (group < 2) group = 2;
    uint32_t *pairs = malloc(sizeof(uint16_t) * (size_t)(blocks * n * padded));
    if (!pairs) return 1;
    const tiled t = {kind, codes, d, scales, more, bias, y, pairs, rows, n, out, in, padded};
#pragma omp parallel if (rows * out * in > 1 << 14) reduction(| : lacking)
    {
        float *sums = malloc(sizeof(float) * (size_t)((group + 1) * 2 * TILE));
        uint16_t room[TALL * NEAR];
        shape_tiles(n);
        lacking |= sums == NULL;
#pragma omp for schedule(static)
        for (long b = 0; b < blocks; b++)
            pair_up(x + b * n * in, rows - b * n < n ? rows - b * n : n, n, in, padded, pairs + b * n * padded / 2);
        for (long begin = 0; begin < blocks; begin += group) {
            long end = begin + group < blocks ? begin + group : blocks;
#pragma omp for schedule(static) nowait
            for (long first = 0; first < out; first += TALL)
                if (sums) multiply_blocks(&t, first, begin, end, room, sums);
        }
        _tile_release();
        free(sums);
    }
    free(pairs);
    return (int)lacking;
}

#else

static int has_tiles(void) {
    return 0;
}

static int multiply_tiles(int kind, const void *codes, const void *d, const void *scales, const void *more,
                          const void *x, const void *bias, void *y, long rows, long out, long in) {
    (void)kind, (void)codes, (void)d, (void)scales, (void)more, (void)x, (void)bias, (void)y;
    (void)rows, (void)out, (void)in;
    return 1;
}
#endif
