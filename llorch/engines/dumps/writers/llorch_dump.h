/* Write tensors of an engine for `llorch diagnose`. C99 or C++, little-endian; copy this file into yours.

    llorch_dump dump = llorch_dump_open("dump", "\"engine\": \"mine\", \"dtype\": \"float32\"");
    llorch_dump_begin(&dump, ids, n_ids, 0);     once for every call of the forward; 0 is the position of ids[0]
    const long shape[] = {n_ids, n_heads, head_dim};
    llorch_dump_add(&dump, "q_rot", layer, "f32", q, 3, shape, NULL);     any plain name of yours; layer -1: in none
    llorch_dump_close(&dump);

The text in llorch_dump_open, and the last argument of llorch_dump_add, are JSON fields that are said besides, or NULL:
"\"tokens\": [7]" of an array that has the rows of some tokens only, "\"strides\": [...]" in bytes. */
#ifndef LLORCH_DUMP_H
#define LLORCH_DUMP_H
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _WIN32
#include <direct.h>
#define LLORCH_MKDIR(folder) _mkdir(folder)
#else
#include <sys/stat.h>
#define LLORCH_MKDIR(folder) mkdir(folder, 0777)
#endif
typedef struct { FILE *data, *index; long long offset; int n_passes; } llorch_dump;

static FILE *llorch_dump_file(const char *folder, const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    if (!file) { perror(path); exit(1); }
    return file;
}
static llorch_dump llorch_dump_open(const char *folder, const char *more) {
    LLORCH_MKDIR(folder);
    llorch_dump dump = {llorch_dump_file(folder, "data.bin"), llorch_dump_file(folder, "index.jsonl"), 0, 0};
    fprintf(dump.index, "{\"llorch_dump\": 1%s%s}\n", more ? ", " : "", more ? more : "");
    return dump;
}
static void llorch_dump_begin(llorch_dump *dump, const int *ids, int n_ids, int first_position) {
    fprintf(dump->index, "{\"pass\": %d, \"first_position\": %d, \"ids\": [", dump->n_passes++, first_position);
    for (int i = 0; i < n_ids; i++) fprintf(dump->index, "%s%d", i ? ", " : "", ids[i]);
    fprintf(dump->index, "]}\n");
}
static void llorch_dump_add(llorch_dump *dump, const char *name, int layer, const char *dtype, const void *array,
                            int n_axes, const long *shape, const char *more) {
    size_t size = (size_t)atoi(dtype + strcspn(dtype, "0123456789")) / 8;  /* of "f32", "bf16", "float64" */
    for (int i = 0; i < n_axes; i++) size *= (size_t)shape[i];
    int failed = fwrite(array, 1, size, dump->data) != size || fflush(dump->data);  /* before its line: true if we die */
    fprintf(dump->index, "{\"name\": \"%s\", \"dtype\": \"%s\", \"file\": \"data.bin\", ", name, dtype);
    fprintf(dump->index, "\"offset\": %lld, \"shape\": [", dump->offset);
    for (int i = 0; i < n_axes; i++) fprintf(dump->index, "%s%ld", i ? ", " : "", shape[i]);
    if (layer >= 0) fprintf(dump->index, "], \"layer\": %d", layer);
    fprintf(dump->index, "%s%s%s}\n", layer >= 0 ? "" : "]", more ? ", " : "", more ? more : "");
    if (failed || fflush(dump->index)) { perror("dump"); exit(1); }
    dump->offset += (long long)size;
}
static void llorch_dump_close(llorch_dump *dump) { fclose(dump->data); fclose(dump->index); }
#endif
