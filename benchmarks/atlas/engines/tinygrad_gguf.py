"""tinygrad: its LLM app, from a GGUF file, tensor by tensor, where it would compile a whole block at once.

HALF=0 keeps the weights in float32. Of its compilers for a CPU, X86 is the one that needs no other program.
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
    """A model of tinygrad, and what was seen since the last pass began."""

    def __init__(self, run: HarnessRun) -> None:
        """Load as `python -m tinygrad.llm` does."""
        self.model, said = llm.Transformer.from_gguf(run.model)
        self.seen: list[tuple[str, int | None, np.ndarray]] = []
        for layer, block in enumerate(self.model.blk):
            for place, (before, after) in STAGES.items():
                if module := getattr(block, place, None):
                    self._watch(module, *_names_with_gates(before, after, block.config), layer)
            if block.config.rope_dim == block.config.head_dim and said["general.architecture"] != "smollm3":
                block._attention = self._with_rope(block._attention, layer)

    def _watch(self, module: Any, before: str, after: str, layer: int | None) -> None:
        inner, add = type(module), self._add

        def call(self: Any, x: Tensor) -> Tensor:
            if before:
                add(before, layer, x)
            return add(after, layer, inner.__call__(self, x))

        module.__class__ = type(inner.__name__, (inner,), {"__call__": call})

    def _with_rope(self, attention: Any, layer: int) -> Any:
        """Attention rotates the queries, then the keys."""

        def watched(x: Tensor, start_pos: int) -> Tensor:
            names, rope = iter(("q_rope", "k_rope")), llm.apply_rope
            llm.apply_rope = lambda x, freqs: self._add(next(names), layer, rope(x, freqs))
            try:
                return attention(x, start_pos)
            finally:
                llm.apply_rope = rope

        return watched

    def _add(self, name: str, layer: int | None, tensor: Tensor) -> Tensor:
        array = tensor.realize().float().numpy()[0]  # unrealised, a state would go on twice
        self.seen.append((name, layer, array.swapaxes(0, 1) if array.ndim == 3 else array))
        return tensor

    def forward(self, ids: list[int], position: int) -> None:
        """Run tinygrad's `Transformer.forward` on the cache of earlier passes, and keep the logits of all positions."""
        self.seen.clear()
        x = self._add("embed", None, self.model.token_embd(Tensor([ids])).float())
        for layer, block in enumerate(self.model.blk):
            x = self._add("block_out", layer, block(x, position).realize())
        normed = self._add("final_norm", None, self.model.output_norm(x))
        self._add("logits", None, self.model.output(normed))


def _names_with_gates(before: str, after: str, config: Any) -> tuple[str, str]:
    """Adapt two stage names to a model whose queries come with gates."""
    gated = before.replace("attn_context", "attn_gated"), "q_gate_proj" if after == "q_proj" else after
    return gated if config.attn_output_gate else (before, after)


def compute(engine: TinygradModel, run: HarnessRun, dump: Any) -> None:
    """All passes, on one cache; where a block is recurrent, as tinygrad generates: token by token."""
    size = 1 if engine.model.has_recurrent_block else max(map(len, run.parts))
    pieces = [(ids[at : at + size], first + at) for ids, first in run.passes for at in range(0, len(ids), size)]
    for ids, first_position in pieces:
        dump.begin(ids, first_position)
        engine.forward(ids, first_position)
        for name, layer, array in engine.seen:
            dump.add(name, array, layer=layer)


if __name__ == "__main__":
    llm.function = lambda **_: lambda block: block  # no compiling of a block: its tensors are not seen otherwise
    answer("tinygrad", TinygradModel, compute)
