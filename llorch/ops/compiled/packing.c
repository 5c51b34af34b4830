/* Codes of a matrix of a quantised folder, from the order of their file to that of llorch/files/quantised/fields.py: bits
 * move, none changes.
 *
 * The twin is in that module, which unpacks a code into a byte and packs it again; here no code is alone in a byte. Words
 * are little-endian. The parts of a word: 8 codes of 4 bits, or 4 of 8 bits. */

#include "numbers.h"

enum order { ROWS, HIGH_FIRST, COLUMNS, AWQ }; /* `Unpacker` says what they are */
enum { SIDE = 16, BLOCK = 64 };                /* words of a tile's side; words of a line that are read together */

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
