# pyright: basic, reportMissingImports=false, reportArgumentType=false
"""llama.cpp: every stage that its scheduler passes to a callback.

Options: "flash_attention", "cache" ("f32", "f16"), "repack" (weights in the layout of the processor), "threads".
"""

import ctypes
import os
from typing import Any

import llama_cpp as cpp
import numpy as np
from dump_writer import DumpWriter
from harness import HarnessRun, answer
from llama_cpp._ggml import libggml

libggml.ggml_op_desc.restype = libggml.ggml_get_name.restype = ctypes.c_char_p
libggml.ggml_nbytes.restype = ctypes.c_size_t
STAGES = {  # by name and operation; a projection with a bias comes twice, the sum last
    "embd GET_ROWS": "embed", "attn_norm MUL": "attn_norm", "Qcur_normed MUL": "q_norm", "Kcur_normed MUL": "k_norm",
    **{f"{letter}cur {op}": f"{letter.lower()}_proj" for letter in "QKV" for op in ("MUL_MAT", "ADD")},
    "Qcur ROPE": "q_rope", "Kcur ROPE": "k_rope", "kqv_out CONT": "attn_context", "node FLASH_ATTN_EXT": "attn_context",
    "ffn_inp ADD": "attn_residual", "ffn_norm MUL": "ffn_norm", "ffn_gate MUL_MAT": "ffn_gate",
    "ffn_up MUL_MAT": "ffn_up", "ffn_swiglu SWIGLU": "ffn_act", "ffn_out MUL_MAT": "ffn_out",
    "ffn_moe_logits MUL_MAT": "router_logits", "ffn_moe_probs SOFT_MAX": "router_probs",
    "l_out ADD": "block_out", "result_norm MUL": "final_norm", "result_output MUL_MAT": "logits",
}  # fmt: skip
DENSE = {"ffn_gate", "ffn_up", "ffn_act", "ffn_out"}  # in layers with experts, these are the shared expert's
HEADED = {"q_proj", "k_proj", "q_norm", "k_norm", "q_rope", "k_rope"}
PAIRED = ("llama", "mistral3", "smollm3")  # GGUF rows are interleaved, Hugging Face has j and j + half


def load(run: HarnessRun) -> tuple[Any, ...]:
    """Load the model, and make a context with a callback that fills a dict in each pass."""
    cpp.llama_backend_init()
    model_params, params = cpp.llama_model_default_params(), cpp.llama_context_default_params()
    model_params.n_gpu_layers, model_params.use_extra_bufts = 0, run.options.get("repack", False)
    model = cpp.llama_model_load_from_file(os.fsencode(run.model), model_params)
    assert model, f"cannot load {run.model}"
    params.n_ctx = params.n_batch = params.n_ubatch = sum(map(len, run.parts))
    params.n_threads = params.n_threads_batch = run.options.get("threads", 1)
    params.type_k = params.type_v = getattr(cpp, f"GGML_TYPE_{run.options.get('cache', 'f32').upper()}")
    params.flash_attn_type = int(run.options.get("flash_attention", False))
    params.cb_eval = callback = cpp.ggml_backend_sched_eval_callback(watcher(stages := {}))
    return model, cpp.llama_init_from_model(model, params), stages, callback


def watcher(stages: dict[tuple[str, int | None], np.ndarray]) -> Any:
    """Make the callback: llama.cpp asks it for every node in order if it wants the node, and then passes the node."""
    stage, layer = "", 0

    def on_node(address: int, ask: bool, _data: Any) -> bool:
        nonlocal stage, layer
        pointer = ctypes.c_void_p(address)
        if not ask:
            data = np.empty(libggml.ggml_nbytes(pointer) // 4, np.float32)  # none of these is a view
            destination, size = ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes)
            libggml.ggml_backend_tensor_get(pointer, destination, ctypes.c_size_t(0), size)
            stages[stage, None if stage in ("embed", "final_norm", "logits") else layer] = data
            return True
        name, _, number = libggml.ggml_get_name(pointer).decode().partition("-")
        layer = int(number) if number.isdecimal() else layer
        operation, name = libggml.ggml_op_desc(pointer).decode(), "node" if name.startswith("node_") else name
        if name in ("node", "attn_out") and f"{stage} {operation}" in ("attn_context MUL_MAT", "attn_out ADD"):
            stage = "attn_out"  # the product with o_proj, which has no name in most families, and the sum with a bias
        elif operation != "RESHAPE":
            stage = STAGES.get(f"{name} {operation}", "")
        return operation != "RESHAPE" and stage != ""

    return on_node


def compute(engine: tuple[Any, ...], run: HarnessRun, dump: DumpWriter) -> None:
    """Decode once for each pass, with an output for every token."""
    model, context, stages, _ = engine
    cpp.llama_model_meta_val_str(model, b"general.architecture", buffer := ctypes.create_string_buffer(64), 64)
    architecture = buffer.value.decode()
    cpp.llama_model_meta_val_str(model, f"{architecture}.attention.key_length".encode(), buffer, 64)
    head_dim = int(buffer.value or cpp.llama_model_n_embd(model) // cpp.llama_model_n_head(model))
    for ids, first_position in run.passes:
        batch = cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, first_position + i, 1, True
            batch.seq_id[i][0] = 0
        dump.begin(ids, first_position)
        assert cpp.llama_decode(context, batch) == 0
        for (stage, layer), array in stages.items():
            rows = array.reshape(len(ids), -1)
            if stage in HEADED:
                heads = rows.reshape(len(ids), -1, head_dim)
                rows = np.concatenate([heads[..., ::2], heads[..., 1::2]], axis=-1) if architecture in PAIRED else heads
            if stage not in DENSE or ("router_logits", layer) not in stages:
                dump.add(stage, rows, layer=layer)
        stages.clear()


if __name__ == "__main__":
    answer("llama-cpp-python", load, compute)
