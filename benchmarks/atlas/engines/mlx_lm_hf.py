"""mlx-lm: its modules have the names of transformers, so one table maps them to stages.

A module is observed by a subclass that calls the original class. Nothing else is changed.
"""
# pyright: basic, reportMissingImports=false

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from harness import HarnessRun, answer
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

STAGES = {  # module, in a layer after its number: the stages that go in and come out
    "embed_tokens": ("", "embed"), "norm": ("", "final_norm"), "": ("", "block_out"),
    "input_layernorm": ("", "attn_norm"), "post_attention_layernorm": ("attn_residual", "ffn_norm"),
    "self_attn.q_proj": ("", "q_proj"), "self_attn.k_proj": ("", "k_proj"), "self_attn.v_proj": ("", "v_proj"),
    "self_attn.q_norm": ("", "q_norm"), "self_attn.k_norm": ("", "k_norm"),
    "self_attn.o_proj": ("attn_context", "attn_out"), "self_attn.rope": ("", "q_rope k_rope"),
    "linear_attn.in_proj_qkv": ("", "qkv_in"), "linear_attn.in_proj_z": ("", "z_in"),
    "linear_attn.in_proj_b": ("", "b_in"), "linear_attn.in_proj_a": ("", "a_in"),
    "linear_attn.out_proj": ("gated_norm", "linear_out"),
    "mlp.gate_proj": ("", "ffn_gate"), "mlp.up_proj": ("", "ffn_up"), "mlp.down_proj": ("ffn_act", "ffn_out"),
    "mlp.gate": ("", "router_logits"), "mlp": ("", "moe_out"),
    "mlp.shared_expert.gate_proj": ("", "shared_ffn_gate"), "mlp.shared_expert.up_proj": ("", "shared_ffn_up"),
    "mlp.shared_expert.down_proj": ("shared_ffn_act", "shared_out"),
}  # fmt: skip


class MlxModel:
    """Model of mlx-lm, its cache, and the arrays recorded since the last pass began."""

    def __init__(self, run: HarnessRun) -> None:
        """Load a folder as `mlx_lm.generate` does, without the tokenizer."""
        self.model: Any = load_model(Path(run.model))[0]
        self.model.set_dtype(getattr(mx, run.options.get("dtype", "float32")))
        self.cache = make_prompt_cache(self.model)
        self.recorded_stages: list[tuple[str, int | None, mx.array]] = []
        for name, module in self.model.named_modules():
            parts = re.search(r"\blayers\.(\d+)\.?(.*)", name)
            layer, place = (int(parts[1]), parts[2]) if parts else (None, name.rpartition(".")[2])
            if place in STAGES and name:
                self._watch(module, *self._stages(place, module), layer)

    def _stages(self, place: str, module: Any) -> tuple[str, list[str]]:
        """Return the stage of a module's input ("" for none) and those of its outputs, one for each call in turn."""
        inputs, outputs = STAGES[place]
        if (place == "mlp" and "gate_proj" in module) or type(module).__name__ == "NoPE":
            return "", []
        if str(self.model.model_type).startswith(("qwen3_5", "qwen3_next")):  # the queries come with gates
            inputs, outputs = inputs.replace("context", "gated"), re.sub("^q_proj", "q_gate_proj", outputs)
        return inputs, outputs.split()

    def _watch(self, module: Any, input_stage: str, output_stages: list[str], layer: int | None) -> None:
        """Replace the module's class so that each call records its input and its output in `recorded_stages`."""
        inner, recorded, calls = type(module), self.recorded_stages, [0]

        def call(self: Any, x: mx.array, *args: Any, **options: Any) -> Any:
            output = inner.__call__(self, x, *args, **options)
            if input_stage:
                recorded.append((input_stage, layer, x))
            if output_stages:
                recorded.append((output_stages[calls[0] % len(output_stages)], layer, output))
            calls[0] += 1
            return output

        module.__class__ = type(inner.__name__, (inner,), {"__call__": call})

    def forward(self, ids: list[int]) -> mx.array:
        """Continue from the cache; return the logits of all positions."""
        self.recorded_stages.clear()
        return self.model(mx.array([ids]), cache=self.cache)


def _stage_array(name: str, array: mx.array) -> np.ndarray:
    """Convert an array without its batch axis, tokens first, heads after them."""
    actual = np.array(array.astype(mx.float32))[0]
    return actual.swapaxes(0, 1) if name in ("q_rope", "k_rope") else actual


def compute(engine: MlxModel, run: HarnessRun, dump: Any) -> None:
    """Run all passes on one cache."""
    for ids, first_position in run.passes:
        dump.begin(ids, first_position)
        logits = engine.forward(ids)
        for name, layer, array in engine.recorded_stages:
            dump.add(name, _stage_array(name, array), layer=layer)
        dump.add("logits", _stage_array("logits", logits))


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    answer("mlx-lm", MlxModel, compute)
