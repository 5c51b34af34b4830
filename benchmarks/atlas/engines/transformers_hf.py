# pyright: basic, reportMissingImports=false
"""transformers: every stage that hooks expose, under the names of its modules.

Options: "attn" ("eager", "sdpa"), "dtype" ("float32", "bfloat16", "float64"). A second pass continues in its cache.
"""

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from dump_writer import DumpWriter
from harness import HarnessRun, answer
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

OUTPUTS = re.compile(
    r"model\.embed_tokens|model\.norm|lm_head|model\.layers\.\d+"
    r"|.*\.(?:input_layernorm|post_attention_layernorm|[qkvo]_proj|[qk]_norm|in_proj_(?:qkv|z|b|a)|out_proj)"
    r"|.*\.mlp\.(?:(?:shared_expert\.)?(?:gate|up|down)_proj)"
)
INPUTS = re.compile(r".*\.(?:o_proj|out_proj|down_proj|post_attention_layernorm)")  # the input is recorded, too
REGISTERED = dict(ALL_ATTENTION_FUNCTIONS.items())  # originals; each family has its own eager attention
ROUTER = ("router_logits", "topk_weights", "topk_ids")  # outputs of `mlp.gate` of Qwen's experts
SCALED_QUERIES = "llama_4_scaling_beta"  # Ministral 3: queries are rotated and scaled, as in Llama 4


def load(run: HarnessRun) -> Any:
    """Load the model by transformers' own loader of folders and of GGUF files."""
    path = Path(run.model)
    folder, options = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    options |= {"dtype": run.options.get("dtype", "float32"), "attn_implementation": run.options.get("attn", "eager")}
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options).eval()


def compute(model: Any, run: HarnessRun, dump: DumpWriter) -> None:
    """Run a forward pass for each part, in one cache."""

    def add(name: str, tensor: torch.Tensor, layer: int | None = None) -> None:
        dump.add(name, (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy(), layer=layer)

    watch(model, add)
    cache = DynamicCache(config=model.config)
    for ids, first_position in run.passes:
        dump.begin(ids, first_position)
        _watch_attention(model.config._attn_implementation, add, first_position + len(ids))
        with torch.no_grad():
            model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True)


def watch(model: torch.nn.Module, add: Any) -> None:
    """Call `add` with the input, the output or both of every module that has a stage."""

    def output(name: str, _module: Any, _inputs: Any, output_value: Any) -> None:
        add(f"{name}.output", (output_value[0] if isinstance(output_value, tuple) else output_value).squeeze(0))

    def input_(name: str, _module: Any, inputs: Any) -> None:
        add(f"{name}.input", inputs[0].squeeze(0))

    def router(layer: int, _module: Any, _inputs: Any, outputs: Any) -> None:
        for stage, tensor in zip(ROUTER, outputs, strict=True):
            add(stage, tensor, layer)

    def experts(layer: int, _module: Any, _inputs: Any, outputs: Any) -> None:
        add("moe_out", outputs[0], layer)

    for name, module in model.named_modules():
        if OUTPUTS.fullmatch(name):
            module.register_forward_hook(partial(output, name))
        if INPUTS.fullmatch(name):
            module.register_forward_pre_hook(partial(input_, name))
        for kind, hook in (("MoeTopKRouter", router), ("MoeSparseMoeBlock", experts)):
            if type(module).__name__.endswith(kind):
                module.register_forward_hook(partial(hook, int(name.split(".")[2])))


def _watch_attention(attention: str, add: Any, n_context: int) -> None:
    """Replace the attention by a wrapper: only there are the rotated queries, and keys of all tokens."""

    def observed(module: Any, query: Any, key: Any, value: Any, *args: Any, **settings: Any) -> Any:
        layer = module.layer_idx
        is_tempered = hasattr(module, "attn_scale") or SCALED_QUERIES in (module.config.rope_parameters or {})
        if not is_tempered and getattr(module, "use_rope", 1):
            add("q_rope", query[0].transpose(0, 1), layer)
        eager = sys.modules[type(module).__module__].eager_attention_forward
        outputs = REGISTERED.get(attention, eager)(module, query, key, value, *args, **settings)
        if key.shape[2] == n_context:  # else the cache has dropped the tokens before the window
            for stage, tensor in (("k_cache", key), ("v_cache", value), ("attn_probs", outputs[1])):
                if tensor is not None:
                    add(stage, tensor[0], layer)
        return outputs

    ALL_ATTENTION_FUNCTIONS[attention] = observed


if __name__ == "__main__":
    answer("transformers", load, compute)
