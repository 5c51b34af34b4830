/* Products of rows of floats with a matrix of ggml's blocks, by ggml's own functions: see `ggml.py`.
 *
 *     y[t, r] = dot(matrix[r], rounded(x[t]))
 *
 * ggml rounds each row of x once. A block of rows of the matrix then meets a block of tokens while both are in the
 * processor cache, so that the matrix is read once for all tokens of a short prompt.
 * Source: llama.cpp ggml/include/ggml-cpu.h, struct ggml_type_traits_cpu. */
#include <stdint.h>
#include <stdlib.h>

typedef void (*from_float)(const float *x, void *rounded, int64_t n);
typedef void (*vec_dot)(int n, float *sum, size_t bs, const void *x, size_t bx, const void *y, size_t by, int rows);

enum { ROWS = 16, TOKENS = 32, WORTH_THREADS = 1 << 14 };

static long least(long a, long b) { return a < b ? a : b; }

/* `matrix` has `out` rows of `row_bytes`; `x` (seq, in); a rounded row has `rounded_bytes`; `y` (seq, out).
 * Returns 1 if memory is lacking. */
int llorch_vec_dot(from_float round, vec_dot dot, const char *matrix, long row_bytes, const float *x,
                   long rounded_bytes, float *y, long seq, long out, long in) {
    char *rounded = malloc((size_t)(seq * rounded_bytes));
    if (!rounded && seq) return 1;
#pragma omp parallel if (seq * out * in > WORTH_THREADS)
    {
#pragma omp for schedule(static)
        for (long t = 0; t < seq; t++) round(x + t * in, rounded + t * rounded_bytes, in);
#pragma omp for schedule(static)
        for (long first = 0; first < out; first += ROWS)
            for (long start = 0; start < seq; start += TOKENS)
                for (long r = first; r < least(first + ROWS, out); r++)
                    for (long t = start; t < least(start + TOKENS, seq); t++)
                        dot((int)in, y + t * out + r, 0, matrix + r * row_bytes, 0, rounded + t * rounded_bytes, 0, 1);
    }
    free(rounded);
    return 0;
}
