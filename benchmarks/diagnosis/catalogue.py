"""Catalogue of rounding differences: errors of right engines, stage by stage, against their tolerances.

    python -m benchmarks.diagnosis.catalogue           print the table of checkpoints/honest_differences.md

Each cell is the largest isolated error of the stage (from the engine's own inputs) over all layers of three models,
and in brackets its share of the tolerance. A share above 1 would be a finding.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from benchmarks.diagnosis.asking import weights_of
from benchmarks.diagnosis.controls import CONTROLS, LLAMA, QWEN2, QWEN3, Control
from llorch.diagnosis.diagnose import diagnose

MODELS = (LLAMA, QWEN2, QWEN3)
PARTS: Mapping[str, tuple[str, ...]] = {
    "norms": ("attn_norm", "ffn_norm", "q_norm", "k_norm", "final_norm"),
    "products": ("q_proj", "k_proj", "v_proj", "attn_out", "ffn_gate", "ffn_up", "ffn_out", "logits"),
    "RoPE": ("q_rope", "k_rope"),
    "cache": ("k_cache", "v_cache"),
    "scores": ("attn_scores",),
    "softmax": ("attn_probs",),
    "values mixed": ("attn_context",),
    "SwiGLU": ("ffn_act",),
    "sums": ("attn_residual", "block_out"),
}
ROWS = (
    "as it is", "sums one by one", "sums backwards", "sums with Kahan's correction", "float64 all through",
    "exponentials as powers of two", "joined products", "flash attention", "float32 angles at 4000",
    "running angles at 4000", "float16 cache", "bfloat16 cache", "float16 cache as ggml has it",
    "float16 inputs of matrices", "Q8_0 inputs of matrices", "bfloat16 activations", "float16 activations",
    "bfloat16, gain after rounding", "dumped as bfloat16", "batch of 2, padded on the left", "prefill in chunks",
)  # fmt: skip


def table() -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| right engines | {' | '.join(PARTS)} |"
    yield f"|---|{'---|' * len(PARTS)}"
    by_name = {variant.name: variant for variant in CONTROLS}
    for name in ROWS:
        yield f"| {name} | {' | '.join(cells(by_name[name]))} |"


def cells(variant: Control) -> Iterator[str]:
    """Yield one cell for each group of stages: the largest local error of an engine, and its share of the tolerance."""
    results = [
        result
        for model in MODELS
        for result in diagnose(weights_of(model), variant.run(model).in_memory(), model=model).results
    ]
    for stages in PARTS.values():
        group = [result for result in results if result.stage in stages]
        if not group:
            yield "-"
            continue
        error, over = max(result.isolated.difference.error for result in group), max(result.over for result in group)
        yield f"{error:.0e} ({over:.2f})" if error else "0"


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        print("\n".join(table()))
