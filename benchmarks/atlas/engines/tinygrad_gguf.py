"""tinygrad: its LLM app, from a GGUF file, tensor by tensor, not compiled block by block.

HALF=0 keeps the weights in float32. Among its CPU compilers, X86 is the one that needs no other program.
"""
# pyright: basic, reportMissingImports=false

import os

os.environ |= {"HALF": "0", "DEV": os.environ.get("DEV", "CPU:X86")}  # before the import, which reads them

from typing import Any

import numpy as np
from harness import HarnessRun, answer
from tinygrad import Tensor
from tinygrad.llm import model as llm

STAGES = {  # member of a block: the stages that go in and come out
    "attn_norm": ("", "attn_norm"), "ffn_norm": ("attn_residual", "ffn_norm"),
    "attn_q": ("", "q_proj"), "attn_k": ("", "k_proj"), "attn_v": ("", "v_proj"),
    "attn_q_norm": ("", "q_norm"), "attn_k_norm": ("", "k_norm"), "attn_output": ("attn_context", "attn_out"),
    "ffn_gate": ("", "ffn_gate"), "ffn_up": ("", "ffn_up"), "ffn_down": ("ffn_act", "ffn_out"),
    "ffn_gate_inp": ("", "router_logits"), "ssm_out": ("", "linear_out"), "ffn_gate_shexp": ("", "shared_ffn_gate"),
    "ffn_up_shexp": ("", "shared_ffn_up"), "ffn_down_shexp": ("shared_ffn_act", "shared_out"),
}  # fmt: skip


class TinygradModel:
    """Model of tinygrad, and the arrays recorded since the last pass began."""

    def __init__(self, run: HarnessRun) -> None:
        """Load as `python -m tinygrad.llm` does."""
        self.model, metadata = llm.Transformer.from_gguf(run.model)
        self.recorded_stages: list[tuple[str, int | None, np.ndarray]] = []
        for layer, block in enumerate(self.model.blk):
            for place, (input_stage, output_stage) in STAGES.items():
                if module := getattr(block, place, None):
                    self._watch(module, *_names_with_gates(input_stage, output_stage, block.config), layer)
            if block.config.rope_dim == block.config.head_dim and metadata["general.architecture"] != "smollm3":
                block._attention = self._with_rope(block._attention, layer)

    def _watch(self, module: Any, input_stage: str, output_stage: str, layer: int | None) -> None:
        inner, add = type(module), self._add

        def call(self: Any, x: Tensor) -> Tensor:
            if input_stage:
                add(input_stage, layer, x)
            return add(output_stage, layer, inner.__call__(self, x))

        module.__class__ = type(inner.__name__, (inner,), {"__call__": call})

    def _with_rope(self, attention: Any, layer: int) -> Any:
        """Wrap attention so that its two rotations are recorded: the queries, then the keys."""

        def observed(x: Tensor, start_pos: int) -> Tensor:
            names, rope = iter(("q_rope", "k_rope")), llm.apply_rope
            llm.apply_rope = lambda x, freqs: self._add(next(names), layer, rope(x, freqs))
            try:
                return attention(x, start_pos)
            finally:
                llm.apply_rope = rope

        return observed

    def _add(self, name: str, layer: int | None, tensor: Tensor) -> Tensor:
        array = tensor.realize().float().numpy()[0]  # else a lazy state would be updated twice
        self.recorded_stages.append((name, layer, array.swapaxes(0, 1) if array.ndim == 3 else array))
        return tensor

    def forward(self, ids: list[int], position: int) -> None:
        """Run tinygrad's `Transformer.forward` on the cache of earlier passes; record the logits of all positions."""
        self.recorded_stages.clear()
        x = self._add("embed", None, self.model.token_embd(Tensor([ids])).float())
        for layer, block in enumerate(self.model.blk):
            x = self._add("block_out", layer, block(x, position).realize())
        final_norm = self._add("final_norm", None, self.model.output_norm(x))
        self._add("logits", None, self.model.output(final_norm))


def _names_with_gates(source: str, target: str, config: Any) -> tuple[str, str]:
    """Adapt two stage names to a model whose queries come with gates."""
    gated = source.replace("attn_context", "attn_gated"), "q_gate_proj" if target == "q_proj" else target
    return gated if config.attn_output_gate else (source, target)


def compute(engine: TinygradModel, run: HarnessRun, dump: Any) -> None:
    """Run all passes on one cache; recurrent blocks token by token, as tinygrad generates."""
    size = 1 if engine.model.has_recurrent_block else max(map(len, run.parts))
    pieces = [(ids[i : i + size], position + i) for ids, position in run.passes for i in range(0, len(ids), size)]
    for ids, first_position in pieces:
        dump.begin(ids, first_position)
        engine.forward(ids, first_position)
        for name, layer, array in engine.recorded_stages:
            dump.add(name, array, layer=layer)


if __name__ == "__main__":
    llm.function = lambda **_: lambda block: block  # blocks are not compiled, so that their tensors can be recorded
    answer("tinygrad", TinygradModel, compute)
