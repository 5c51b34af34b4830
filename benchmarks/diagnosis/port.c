/* A small engine, as somebody might port Llama and Qwen2 to C: float32, the whole prompt at once, no cache.
 *
 *     llorch convert story model
 *     cc -O2 -I llorch/engines/dumps/writers benchmarks/diagnosis/port.c -lm -o port
 *     ./port model dump 998 466 467 258 415 411 277 258 434 429 261 785
 *
 * It reads config.json and model.safetensors (F32) of a Hugging Face folder, prints the most likely next token, and
 * dumps what it computed in the first and the last layer, under names of its own.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llorch_dump.h"

typedef struct {
    int hidden, inter, n_layers, n_heads, n_kv_heads, head_dim, vocab;
    float eps, theta;
    const char *header;  /* of model.safetensors, JSON */
    const char *data;
} Model;

static void fail(const char *what, const char *name) {
    fprintf(stderr, "port: %s %s\n", what, name);
    exit(1);
}

static float *floats(size_t n) {
    float *room = calloc(n, sizeof *room);
    if (!room) fail("out of memory", "");
    return room;
}

/* ---- files ---- */

static char *read_file(const char *folder, const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) fail("cannot read", path);
    size_t size = (size_t)ftell(file);
    char *text = malloc(size + 1);
    rewind(file);
    if (!text || fread(text, 1, size, file) != size) fail("cannot read", path);
    text[size] = 0;
    fclose(file);
    return text;
}

static double number(const char *json, const char *key, double otherwise) {
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    const char *found = strstr(json, quoted);
    return found ? strtod(found + strlen(quoted), NULL) : otherwise;
}

static Model read_model(const char *folder) {
    Model m;
    char *config = read_file(folder, "config.json"), *file = read_file(folder, "model.safetensors");
    m.hidden = (int)number(config, "hidden_size", 0);
    m.inter = (int)number(config, "intermediate_size", 0);
    m.n_layers = (int)number(config, "num_hidden_layers", 0);
    m.n_heads = (int)number(config, "num_attention_heads", 0);
    m.n_kv_heads = (int)number(config, "num_key_value_heads", m.n_heads);
    m.head_dim = (int)number(config, "head_dim", m.hidden / m.n_heads);
    m.vocab = (int)number(config, "vocab_size", 0);
    m.eps = (float)number(config, "rms_norm_eps", 1e-6);
    m.theta = (float)number(config, "rope_theta", 10000);
    unsigned long long length;
    memcpy(&length, file, 8);
    m.data = file + 8 + length;
    char *header = malloc(length + 1);
    if (!header) fail("out of memory", "");
    memcpy(header, file + 8, length);
    header[length] = 0;
    m.header = header;
    return m;
}

/* A tensor by name, `%d` in it is the layer; NULL where the model has none. */
static const float *tensor(const Model *m, const char *name, int layer) {
    char format[160], quoted[160];
    snprintf(format, sizeof format, "\"model.%s\":{", name);
    snprintf(quoted, sizeof quoted, format, layer);
    const char *found = strstr(m->header, quoted);
    if (!found) return NULL;
    if (strncmp(strstr(found, "\"dtype\":"), "\"dtype\":\"F32\"", 13)) fail("expected F32:", quoted);
    return (const float *)(m->data + strtoull(strchr(strstr(found, "data_offsets"), '[') + 1, NULL, 10));
}

static const float *need(const Model *m, const char *name, int layer) {
    const float *found = tensor(m, name, layer);
    if (!found) fail("no tensor", name);
    return found;
}

/* ---- steps; rows are tokens ---- */

static void rms_norm(float *out, const float *x, const float *weight, int n, int width, float eps) {
    for (int t = 0; t < n; t++, x += width, out += width) {
        float sum = 0;
        for (int i = 0; i < width; i++) sum += x[i] * x[i];
        float scale = 1 / sqrtf(sum / width + eps);
        for (int i = 0; i < width; i++) out[i] = x[i] * scale * weight[i];
    }
}

static void linear(float *out, const float *x, const float *weight, const float *bias, int n, int width, int n_out) {
    for (int t = 0; t < n; t++)
        for (int row = 0; row < n_out; row++) {
            float sum = bias ? bias[row] : 0;
            for (int i = 0; i < width; i++) sum += x[t * width + i] * weight[(size_t)row * width + i];
            out[t * n_out + row] = sum;
        }
}

static void rope(float *x, int n, int n_heads, int head_dim, float theta) {
    for (int t = 0; t < n; t++)
        for (int head = 0; head < n_heads; head++, x += head_dim)
            for (int i = 0; i < head_dim; i += 2) {
                double angle = t * pow(theta, -(double)i / head_dim);
                float c = (float)cos(angle), s = (float)sin(angle), a = x[i], b = x[i + 1];
                x[i] = a * c - b * s;
                x[i + 1] = a * s + b * c;
            }
}

static void attention(float *out, const float *q, const float *k, const float *v, const Model *m, int n) {
    int d = m->head_dim, group = m->n_heads / m->n_kv_heads;
    float *p = floats((size_t)n);
    for (int t = 0; t < n; t++)
        for (int head = 0; head < m->n_heads; head++) {
            const float *query = q + (t * m->n_heads + head) * d;
            float *sum_of_values = out + (t * m->n_heads + head) * d, largest = -INFINITY, total = 0;
            for (int past = 0; past <= t; past++) {
                const float *key = k + (past * m->n_kv_heads + head / group) * d;
                p[past] = 0;
                for (int i = 0; i < d; i++) p[past] += query[i] * key[i];
                p[past] /= sqrtf((float)d);
                if (p[past] > largest) largest = p[past];
            }
            for (int past = 0; past <= t; past++) total += p[past] = expf(p[past] - largest);
            memset(sum_of_values, 0, (size_t)d * sizeof *out);
            for (int past = 0; past <= t; past++)
                for (int i = 0; i < d; i++)
                    sum_of_values[i] += p[past] / total * v[(past * m->n_kv_heads + head / group) * d + i];
        }
    free(p);
}

static void add(float *x, const float *more, int n) {
    for (int i = 0; i < n; i++) x[i] += more[i];
}

/* ---- the model ---- */

static void dump(llorch_dump *to, const char *name, int layer, const float *x, int n, int width) {
    const long shape[] = {n, width};
    llorch_dump_add(to, name, layer, "f32", x, 2, shape, NULL);
}

static int forward(const Model *m, const int *ids, int n, llorch_dump *to) {
    int q_width = m->n_heads * m->head_dim, kv_width = m->n_kv_heads * m->head_dim;
    float *x = floats((size_t)n * m->hidden), *normed = floats((size_t)n * m->hidden);
    float *q = floats((size_t)n * q_width), *ctx = floats((size_t)n * q_width), *out = floats((size_t)n * m->hidden);
    float *k = floats((size_t)n * kv_width), *v = floats((size_t)n * kv_width);
    float *gate = floats((size_t)n * m->inter), *up = floats((size_t)n * m->inter);
    float *logits = floats((size_t)n * m->vocab);
    const float *table = need(m, "embed_tokens.weight", 0);
    for (int t = 0; t < n; t++) memcpy(x + t * m->hidden, table + ids[t] * m->hidden, (size_t)m->hidden * sizeof *x);
    for (int l = 0; l < m->n_layers; l++) {
        rms_norm(normed, x, need(m, "layers.%d.input_layernorm.weight", l), n, m->hidden, m->eps);
        linear(q, normed, need(m, "layers.%d.self_attn.q_proj.weight", l),
               tensor(m, "layers.%d.self_attn.q_proj.bias", l), n, m->hidden, q_width);
        linear(k, normed, need(m, "layers.%d.self_attn.k_proj.weight", l),
               tensor(m, "layers.%d.self_attn.k_proj.bias", l), n, m->hidden, kv_width);
        linear(v, normed, need(m, "layers.%d.self_attn.v_proj.weight", l),
               tensor(m, "layers.%d.self_attn.v_proj.bias", l), n, m->hidden, kv_width);
        rope(q, n, m->n_heads, m->head_dim, m->theta);
        rope(k, n, m->n_kv_heads, m->head_dim, m->theta);
        attention(ctx, q, k, v, m, n);
        int shown = l == 0 || l == m->n_layers - 1;
        if (shown) dump(to, "in", l, normed, n, m->hidden), dump(to, "rot_q", l, q, n, q_width);
        if (shown) dump(to, "rot_k", l, k, n, kv_width), dump(to, "ctx", l, ctx, n, q_width);
        linear(out, ctx, need(m, "layers.%d.self_attn.o_proj.weight", l), NULL, n, q_width, m->hidden);
        add(x, out, n * m->hidden);
        if (shown) dump(to, "h1", l, x, n, m->hidden);
        rms_norm(normed, x, need(m, "layers.%d.post_attention_layernorm.weight", l), n, m->hidden, m->eps);
        linear(gate, normed, need(m, "layers.%d.mlp.gate_proj.weight", l), NULL, n, m->hidden, m->inter);
        linear(up, normed, need(m, "layers.%d.mlp.up_proj.weight", l), NULL, n, m->hidden, m->inter);
        for (int i = 0; i < n * m->inter; i++) up[i] *= gate[i] / (1 + expf(-gate[i]));
        linear(out, up, need(m, "layers.%d.mlp.down_proj.weight", l), NULL, n, m->inter, m->hidden);
        add(x, out, n * m->hidden);
        if (shown) dump(to, "h2", l, x, n, m->hidden);
    }
    rms_norm(normed, x, need(m, "norm.weight", 0), n, m->hidden, m->eps);
    linear(logits, normed, table, NULL, n, m->hidden, m->vocab);  /* the table is lm_head too */
    dump(to, "scores", -1, logits, n, m->vocab);
    int best = 0;
    for (int id = 1; id < m->vocab; id++)
        if (logits[(n - 1) * m->vocab + id] > logits[(n - 1) * m->vocab + best]) best = id;
    return best;  /* the process ends now: nothing is freed */
}

int main(int n_arguments, char **arguments) {
    if (n_arguments < 4) fail("usage: port MODEL_FOLDER DUMP_FOLDER id id ...", "");
    Model m = read_model(arguments[1]);
    int n = n_arguments - 3, ids[1024];
    if (n > 1024) fail("at most 1024 tokens", "");
    for (int t = 0; t < n; t++)
        if ((ids[t] = atoi(arguments[3 + t])) < 0 || ids[t] >= m.vocab) fail("no such id:", arguments[3 + t]);
    llorch_dump to = llorch_dump_open(arguments[2], "\"engine\": \"port.c\", \"dtype\": \"f32\"");
    llorch_dump_begin(&to, ids, n, 0);
    printf("next token: %d\n", forward(&m, ids, n, &to));
    llorch_dump_close(&to);
    return 0;
}
