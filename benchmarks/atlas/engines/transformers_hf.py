# pyright: basic, reportMissingImports=false
"""transformers: every stage that hooks show, under the names of its own modules.

Options: "attn" ("eager", "sdpa"), "dtype" ("float32", "bfloat16", "float64"). A second pass goes on in its cache.
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

SHOWN = re.compile(
    r"model\.embed_tokens|model\.norm|lm_head|model\.layers\.\d+"
    r"|.*\.(?:input_layernorm|post_attention_layernorm|[qkvo]_proj|[qk]_norm|in_proj_(?:qkv|z|b|a)|out_proj)"
    r"|.*\.mlp\.(?:(?:shared_expert\.)?(?:gate|up|down)_proj)"
)
INPUTS = re.compile(r".*\.(?:o_proj|out_proj|down_proj|post_attention_layernorm)")  # shown as well
REGISTERED = dict(ALL_ATTENTION_FUNCTIONS.items())  # as they were; eager attention is one of each family
ROUTER = ("router_logits", "topk_weights", "topk_ids")  # what `mlp.gate` of Qwen's experts gives
TEMPERED = "llama_4_scaling_beta"  # Ministral 3: queries are more than rotated; so are those of Llama 4


def load(run: HarnessRun) -> Any:
    """Load the model by transformers' own loader of folders and of GGUF files."""
    path = Path(run.model)
    folder, more = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    more |= {"dtype": run.options.get("dtype", "float32"), "attn_implementation": run.options.get("attn", "eager")}
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **more).eval()


def compute(model: Any, run: HarnessRun, dump: DumpWriter) -> None:
    """Run a forward for each pass, in one cache."""

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
    """Have `add` given the input, the output or both of every module that shows a stage."""

    def output(name: str, _module: Any, _given: Any, made: Any) -> None:
        add(f"{name}.output", (made[0] if isinstance(made, tuple) else made).squeeze(0))

    def input_(name: str, _module: Any, given: Any) -> None:
        add(f"{name}.input", given[0].squeeze(0))

    def with_load_paths(layer: int, _module: Any, _given: Any, made: Any) -> None:
        for stage, tensor in zip(ROUTER, made, strict=True):
            add(stage, tensor, layer)

    def mixed(layer: int, _module: Any, _given: Any, made: Any) -> None:
        add("moe_out", made[0], layer)

    for name, module in model.named_modules():
        if SHOWN.fullmatch(name):
            module.register_forward_hook(partial(output, name))
        if INPUTS.fullmatch(name):
            module.register_forward_pre_hook(partial(input_, name))
        for kind, hook in (("MoeTopKRouter", with_load_paths), ("MoeSparseMoeBlock", mixed)):
            if type(module).__name__.endswith(kind):
                module.register_forward_hook(partial(hook, int(name.split(".")[2])))


def _watch_attention(attention: str, add: Any, n_context: int) -> None:
    """Put a function in front of the attention: it alone is given the rotated queries, and keys of all tokens."""

    def watched(module: Any, query: Any, key: Any, value: Any, *rest: Any, **settings: Any) -> Any:
        layer = module.layer_idx
        is_tempered = hasattr(module, "attn_scale") or TEMPERED in (module.config.rope_parameters or {})
        if not is_tempered and getattr(module, "use_rope", 1):
            add("q_rope", query[0].transpose(0, 1), layer)
        eager = sys.modules[type(module).__module__].eager_attention_forward
        made = REGISTERED.get(attention, eager)(module, query, key, value, *rest, **settings)
        if key.shape[2] == n_context:  # else the cache has forgotten what lies before the window
            for stage, tensor in (("k_cache", key), ("v_cache", value), ("attn_probs", made[1])):
                if tensor is not None:
                    add(stage, tensor[0], layer)
        return made

    ALL_ATTENTION_FUNCTIONS[attention] = watched


if __name__ == "__main__":
    answer("transformers", load, compute)
