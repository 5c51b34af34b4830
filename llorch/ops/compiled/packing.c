/* Codes of a matrix, from the order of their file to that of llorch/pytorch/kernels/packing.py: bits move, none changes.
 *
 * For quantised folders, the twin is llorch/files/quantised/fields.py, which unpacks a code into a byte and packs it
 * again; here no code is alone in a byte. Words are little-endian. The parts of a word: 8 codes of 4 bits, or 4 of 8 bits. For the blocks of
 * a GGUF file, the twin is `pack` in packing.py. */

#include "numbers.h"

enum order { ROWS, HIGH_FIRST, COLUMNS, AWQ }; /* `Unpacker` says what they are */
enum { SIDE = 16, BLOCK = 64 };                /* words of a tile's side; words of a line that are read together */
enum kind { Q8_0 = 2, Q4_0, Q4_K, Q6_K };      /* `KINDS` in quantised.py */
enum { WORTH_THREADS = 1 << 10 };              /* blocks */

/* Eight codes of a word, c0 in the lowest bits: bytes c0 | c4 << 4, c2 | c6 << 4, c1 | c5 << 4, c3 | c7 << 4. */
static inline uint32_t pairs(uint32_t word, int high_first) {
    uint32_t low = word & 0x0f0f0f0f, high = word >> 4 & 0x0f0f0f0f;
    uint32_t even = high_first ? high : low, odd = high_first ? low : high;
    return ((even | even >> 12) & 0xffff) | (odd | odd >> 12) << 16;
}

/* 32 codes of 4 bits, which take 16 bytes: byte 4 i + j has codes 8 j + i and 8 j + 4 + i. */
static inline void join_run(const uint8_t *stored, uint8_t *packed, int high_first) {
    uint32_t word[4], joined[4];
    memcpy(word, stored, sizeof word);
    for (int j = 0; j < 4; j++) word[j] = pairs(word[j], high_first);
    for (int i = 0; i < 4; i++) {
        int shift = (i & 1) * 16 + (i >> 1) * 8; /* pairs of codes 0, 1, 2, 3 are in bytes 0, 2, 1, 3 */
        joined[i] = (word[0] >> shift & 255) | (word[1] >> shift & 255) << 8 | (word[2] >> shift & 255) << 16 |
                    (word[3] >> shift & 255) << 24;
    }
    memcpy(packed, joined, sizeof joined);
}

static inline __attribute__((always_inline)) void join_runs(const uint8_t *stored, uint8_t *packed, long n, int high_first) {
    long i = 0;
#ifdef __AVX2__
    const __m256i mask = _mm256_set1_epi32(0x0f0f0f0f), half = _mm256_set1_epi32(0xffff);
    const __m256i turn = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15));
    for (; i + 2 <= n; i += 2) {
        __m256i words = _mm256_loadu_si256((const __m256i *)(stored + 16 * i));
        __m256i low = _mm256_and_si256(words, mask), high = _mm256_and_si256(_mm256_srli_epi32(words, 4), mask);
        __m256i even = high_first ? high : low, odd = high_first ? low : high;
        even = _mm256_and_si256(_mm256_or_si256(even, _mm256_srli_epi32(even, 12)), half);
        odd = _mm256_slli_epi32(_mm256_or_si256(odd, _mm256_srli_epi32(odd, 12)), 16);
        _mm256_storeu_si256((__m256i *)(packed + 16 * i), _mm256_shuffle_epi8(_mm256_or_si256(even, odd), turn));
    }
#endif
    for (; i < n; i++) join_run(stored + 16 * i, packed + 16 * i, high_first);
}

/* A tile of some lines of words, turned: word l of column c is line l of the file. */
static inline __attribute__((always_inline)) void turn_tile(
    const uint8_t *stored, long line, long lines, long columns, uint32_t tile[SIDE][SIDE]) {
    for (long l = 0; l < lines; l++) {
        uint32_t words[SIDE];
        memcpy(words, stored + l * line, 4 * (size_t)columns);
        __builtin_prefetch(stored + (l + SIDE) * line); /* the processor does not look beyond a page by itself */
        for (long c = 0; c < columns; c++) tile[c][l] = words[c];
    }
}

/* Rows `first` and more of a matrix whose words go down its columns: line l has word l of every row. */
static void pack_columns(int bits, const uint8_t *stored, uint8_t *packed, long first, long n, long out, long in) {
    const long lines = in * bits / 32, bytes = in * bits / 8;
    for (long l = 0; l < lines; l += SIDE) {
        const long some = lines - l < SIDE ? lines - l : SIDE;
        for (long r = first; r < first + n; r += SIDE) {
            const long rows = first + n - r < SIDE ? first + n - r : SIDE;
            uint32_t tile[SIDE][SIDE];
            if (some == SIDE && rows == SIDE) turn_tile(stored + 4 * (l * out + r), 4 * out, SIDE, SIDE, tile);
            else turn_tile(stored + 4 * (l * out + r), 4 * out, some, rows, tile);
            for (long c = 0; c < rows; c++) {
                uint8_t *to = packed + (r + c) * bytes + 4 * l;
                if (bits == 4) join_runs((const uint8_t *)tile[c], to, some / 4, 0);
                else memcpy(to, tile[c], 4 * (size_t)some);
            }
        }
    }
}

static const int AWQ_ROWS[2][4] = {{0, 4, 1, 5}, {2, 6, 3, 7}}; /* of the lower and the upper halves of four bytes */

#ifdef __AVX2__
/* Two squares of 16 x 16 bytes, one beside the other, turned: four times, rows i and i + 8 are mixed byte by byte. */
static inline void turn_squares(__m256i rows[SIDE]) {
    for (int time = 0; time < 4; time++) {
        __m256i mixed[SIDE];
        for (int i = 0; i < SIDE / 2; i++) {
            mixed[2 * i] = _mm256_unpacklo_epi8(rows[i], rows[i + SIDE / 2]);
            mixed[2 * i + 1] = _mm256_unpackhi_epi8(rows[i], rows[i + SIDE / 2]);
        }
        memcpy(rows, mixed, sizeof mixed);
    }
}

/* As `pack_awq_run`, of eight words. */
static inline void pack_awq_octet(const uint8_t *stored, long line, uint8_t *packed, long bytes) {
    const __m256i low = _mm256_set1_epi8(0x0f);
    __m256i rows[2][SIDE];
    for (int at = 0; at < SIDE; at++) {
        const uint8_t *one = stored + (8 * (at % 4) + at / 4) * line;
        __builtin_prefetch(one + RUN * line);
        __builtin_prefetch(one + (RUN + 4) * line);
        __m256i first = _mm256_loadu_si256((const __m256i *)one);
        __m256i second = _mm256_loadu_si256((const __m256i *)(one + 4 * line));
        rows[0][at] = _mm256_or_si256(
            _mm256_and_si256(first, low), _mm256_slli_epi32(_mm256_and_si256(second, low), 4));
        rows[1][at] = _mm256_or_si256(
            _mm256_and_si256(_mm256_srli_epi32(first, 4), low), _mm256_andnot_si256(low, second));
    }
    for (int half = 0; half < 2; half++) {
        turn_squares(rows[half]);
        for (int c = 0; c < SIDE; c++) {
            uint8_t *to = packed + (8 * (c / 4) + AWQ_ROWS[half][c % 4]) * bytes;
            _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(rows[half][c]));
            _mm_storeu_si128((__m128i *)(to + SIDE * 2 * bytes), _mm256_extracti128_si256(rows[half][c], 1));
        }
    }
}
#endif

/* 32 lines of 8 rows each: line 8 j + i and the fourth line after it make byte 4 i + j of the run of every row. */
static void pack_awq_run(const uint8_t *stored, long line, uint8_t *packed, long bytes, long words) {
    long w = 0;
#ifdef __AVX2__
    for (; w + 8 <= words; w += 8) pack_awq_octet(stored + 4 * w, line, packed + 8 * w * bytes, bytes);
#endif
    for (; w < words; w++)
        for (int at = 0; at < SIDE; at++) {
            uint32_t first, second;
            memcpy(&first, stored + (8 * (at % 4) + at / 4) * line + 4 * w, sizeof first);
            memcpy(&second, stored + (8 * (at % 4) + at / 4 + 4) * line + 4 * w, sizeof second);
            const uint32_t joined[2] = {(first & 0x0f0f0f0f) | (second & 0x0f0f0f0f) << 4,
                                        (first >> 4 & 0x0f0f0f0f) | (second & 0xf0f0f0f0)};
            for (int half = 0; half < 2; half++)
                for (int b = 0; b < 4; b++)
                    packed[(8 * w + AWQ_ROWS[half][b]) * bytes + at] = (uint8_t)(joined[half] >> 8 * b);
        }
}

static void pack_awq(const uint8_t *stored, uint8_t *packed, long first, long n, long out, long in) {
    const long line = out / 2, bytes = in / 2;
    for (long run = 0; run < in / RUN; run++)
        pack_awq_run(stored + RUN * run * line + 4 * first, line, packed + 8 * first * bytes + 16 * run, bytes, n);
}

/* A matrix of `out` rows and `in` columns, which are whole runs. `bits` of a code: 4 in every order, 8 in COLUMNS too. */
void llorch_pack_codes(int order, int bits, const void *stored, void *packed, long out, long in) {
    const long units = order == AWQ ? out / 8 : out; /* words of a line, or rows */
#pragma omp parallel for schedule(static)
    for (long first = 0; first < units; first += BLOCK) {
        const long n = units - first < BLOCK ? units - first : BLOCK, from = first * in / 2;
        if (order == COLUMNS) pack_columns(bits, stored, packed, first, n, out, in);
        else if (order == AWQ) pack_awq(stored, packed, first, n, out, in);
        else if (order == ROWS) join_runs((const uint8_t *)stored + from, (uint8_t *)packed + from, n * in / RUN, 0);
        else join_runs((const uint8_t *)stored + from, (uint8_t *)packed + from, n * in / RUN, 1);
    }
}

/* Four bits, from bit `shift` on, of each of 32 bytes: byte 4 i + j has those of bytes 8 j + i and 8 j + 4 + i. */
static inline void join_four_bits(const uint64_t eight[4], int shift, uint8_t *packed) {
    uint32_t joined[4], word[4];
    for (int j = 0; j < 4; j++) {
        uint64_t codes = eight[j] >> shift & 0x0f0f0f0f0f0f0f0f;
        joined[j] = (uint32_t)(codes | codes >> 28);
    }
    for (int i = 0; i < 4; i++)
        word[i] = (joined[0] >> 8 * i & 255) | (joined[1] >> 8 * i & 255) << 8 | (joined[2] >> 8 * i & 255) << 16 |
                  (joined[3] >> 8 * i & 255) << 24;
    memcpy(packed, word, sizeof word);
}

/* The lower four bits of 32 bytes; their upper ones go to `upper`. */
static inline void split_bytes(const uint8_t *bytes, uint8_t *lower, uint8_t *upper) {
    uint64_t eight[4];
    memcpy(eight, bytes, sizeof eight);
    join_four_bits(eight, 0, lower);
    join_four_bits(eight, 4, upper);
}

/* Twelve bytes that hold eight scales and eight minima of six bits: a scale and its minimum take twelve bits, in order. */
static inline void pack_six_bits(const uint8_t *stored, uint8_t *packed) {
    uint8_t scale[8], minimum[8];
    for (int r = 0; r < 4; r++) {
        scale[r] = stored[r] & 63;
        minimum[r] = stored[r + 4] & 63;
        scale[r + 4] = (stored[r + 8] & 15) | stored[r] >> 6 << 4;
        minimum[r + 4] = stored[r + 8] >> 4 | stored[r + 4] >> 6 << 4;
    }
    for (int r = 0; r < 8; r += 2, packed += 3) {
        packed[0] = (uint8_t)(scale[r] | minimum[r] << 6);
        packed[1] = (uint8_t)(minimum[r] >> 2 | scale[r + 1] << 4);
        packed[2] = (uint8_t)(scale[r + 1] >> 4 | minimum[r + 1] << 2);
    }
}

/* Two bits of 32 bytes from bit `shift` on: bytes 2 i and 2 i + 1 have codes i, 4 + i, 8 + i and so on. */
static inline void join_two_bits(const uint8_t *bytes, int shift, uint8_t *packed) {
    for (int i = 0; i < 4; i++)
        for (int half = 0; half < 2; half++) {
            const uint8_t *part = bytes + 16 * half + i;
            packed[2 * i + half] = (uint8_t)((part[0] >> shift & 3) | (part[4] >> shift & 3) << 2 |
                                             (part[8] >> shift & 3) << 4 | (part[12] >> shift & 3) << 6);
        }
}

typedef struct {
    uint8_t *codes, *upper, *scales, *d, *dmin; /* as in packing.py; NULL where a kind has none */
} fields;

static inline void pack_q4_0(const uint8_t *block, const fields *to, long i) {
    uint64_t half[2];
    memcpy(half, block + 2, sizeof half);
    join_four_bits((const uint64_t[4]){half[0], half[1], half[0] >> 4, half[1] >> 4}, 0, to->codes + 16 * i);
    memcpy(to->d + 2 * i, block, 2);
}

static inline void pack_q4_k(const uint8_t *block, const fields *to, long i) {
    for (int part = 0; part < 4; part++) {
        uint8_t *codes = to->codes + 128 * i + 32 * part;
        split_bytes(block + 16 + 32 * part, codes, codes + 16);
    }
    pack_six_bits(block + 4, to->scales + 12 * i);
    memcpy(to->d + 2 * i, block, 2);
    memcpy(to->dmin + 2 * i, block + 2, 2);
}

static inline void pack_q6_k(const uint8_t *block, const fields *to, long i) {
    for (int half = 0; half < 2; half++) {
        uint8_t *codes = to->codes + 128 * i + 64 * half;
        for (int run = 0; run < 2; run++)
            split_bytes(block + 64 * half + 32 * run, codes + 16 * run, codes + 32 + 16 * run);
        for (int run = 0; run < 4; run++)
            join_two_bits(block + 128 + 32 * half, 2 * run, to->upper + 64 * i + 32 * half + 8 * run);
    }
    memcpy(to->scales + 16 * i, block + 192, 16);
    memcpy(to->d + 2 * i, block + 208, 2);
}

/* n blocks of a GGUF file, taken apart. */
void llorch_pack_blocks(
    int kind, const void *blocks, void *codes, void *upper, void *scales, void *d, void *dmin, long n) {
    const fields to = {codes, upper, scales, d, dmin};
    const uint8_t *from = blocks;
#pragma omp parallel for schedule(static) if (n >= WORTH_THREADS)
    for (long i = 0; i < n; i++) {
        if (kind == Q4_0) pack_q4_0(from + 18 * i, &to, i);
        else if (kind == Q4_K) pack_q4_k(from + 144 * i, &to, i);
        else if (kind == Q6_K) pack_q6_k(from + 210 * i, &to, i);
        else {
            memcpy(to.codes + 32 * i, from + 34 * i + 2, 32);
            memcpy(to.d + 2 * i, from + 34 * i, 2);
        }
    }
}
