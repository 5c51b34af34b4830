// Write the nodes of ggml graphs for `llorch diagnose`: an eval callback. C++17, little-endian; copy this file.
//
//     LlorchDump dump("dump", R"("engine": "llama.cpp", "kv_cache": "f16")");  // JSON fields that are said besides
//     params.cb_eval = LlorchDump::node;           // of llama_context_params, before the context is made;
//     params.cb_eval_user_data = &dump;            // elsewhere ggml_backend_sched_set_eval_callback
//     dump.begin(ids, n_ids, first_position);      // before each llama_decode
// Nodes keep their names and say their op. Ask for the logits of every token, and take n_ubatch of at least as many
// tokens as a pass has: else the last layer has rows of some tokens, or a pass the same nodes twice.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include "ggml-backend.h"

class LlorchDump {
    FILE *data, *index;
    long long offset = 0, n_passes = 0;
    static FILE *file(const std::string &path) {
        FILE *opened = std::fopen(path.c_str(), "wb");
        if (!opened) { std::perror(path.c_str()); std::exit(1); }
        return opened;
    }
    void write(const ggml_tensor *t) {
        std::string bytes(ggml_nbytes(t), 0);  // of a tensor with gaps, these too: strides say where its rows are
        ggml_backend_tensor_get(t, bytes.data(), 0, bytes.size());
        std::string shape, strides;
        for (int axis = ggml_n_dims(t) - 1; axis >= 0; axis--) {  // ggml counts from the fastest axis
            shape += std::to_string(t->ne[axis]) + (axis ? ", " : "");
            strides += std::to_string(t->nb[axis]) + (axis ? ", " : "");
        }
        const bool whole = std::fwrite(bytes.data(), 1, bytes.size(), data) == bytes.size() && !std::fflush(data);
        std::fprintf(index, "{\"name\": \"%s\", \"op\": \"%s\", \"dtype\": \"%s\", \"shape\": [%s], \"strides\": [%s], "
                     "\"file\": \"data.bin\", \"offset\": %lld}\n",
                     t->name, ggml_op_name(t->op), ggml_type_name(t->type), shape.c_str(), strides.c_str(), offset);
        if (!whole || std::fflush(index)) { std::perror("dump"); std::exit(1); }
        offset += (long long) bytes.size();
    }
public:
    LlorchDump(const std::string &folder, const std::string &more = "")
        : data((std::filesystem::create_directories(folder), file(folder + "/data.bin"))),
          index(file(folder + "/index.jsonl")) {
        std::fprintf(index, "{\"llorch_dump\": 1%s%s}\n", more.empty() ? "" : ", ", more.c_str());
    }
    void begin(const int32_t *ids, int n_ids, int first_position = 0) {
        std::fprintf(index, "{\"pass\": %lld, \"first_position\": %d, \"ids\": [", n_passes++, first_position);
        for (int i = 0; i < n_ids; i++) std::fprintf(index, "%s%d", i ? ", " : "", (int) ids[i]);
        std::fprintf(index, "]}\n");
    }
    static bool node(ggml_tensor *t, bool ask, void *dump) {
        const ggml_op no[] = {GGML_OP_NONE, GGML_OP_VIEW, GGML_OP_RESHAPE, GGML_OP_PERMUTE, GGML_OP_TRANSPOSE,
                              GGML_OP_CPY, GGML_OP_SET_ROWS};  // nothing is computed; or all of the cache
        const bool floats = t->type == GGML_TYPE_F32 || t->type == GGML_TYPE_F16 || t->type == GGML_TYPE_BF16;
        auto *self = static_cast<LlorchDump *>(dump);  // before the first pass is what engines run to warm up
        const bool wanted = self->n_passes && floats && std::find(std::begin(no), std::end(no), t->op) == std::end(no);
        if (wanted && !ask) self->write(t);
        return ask ? wanted : true;
    }
};
