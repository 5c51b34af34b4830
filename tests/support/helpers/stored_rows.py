"""Rows of the stored goldens that several test modules look at, computed once in a process."""

from collections.abc import Sequence
from functools import cache

from helpers.torch_targets import CPU, CUDA, target_or_skip
from llorch.judging.expectations.quantised import verify_quantised_stored
from llorch.judging.runners.torch import VARIANTS, torch_runners
from llorch.judging.types import Comparison
from llorch.judging.verify import verify_stored

# What is judged of every model on the CPU: as it is written, and as users get it. `WHOLE`, which has every kind of
# stage, is judged in all variants; `llorch verify --backend torch` does that for five models by day, and for all
# at night.
EVERYWHERE = {
    "torch-cpu-float32": ("", "-fast-batch"),
    "torch-cpu-bfloat16": ("", "-fast-batch"),
    "torch-cpu-float16": ("",),
    "torch-cpu-float64": ("",),
}
WHOLE = "micro-qwen3"
WHOLE_IN = ("torch-cpu-float32", "torch-cpu-bfloat16")


@cache
def quantised_rows() -> Sequence[Comparison]:
    return tuple(verify_quantised_stored())


@cache
def compare_torch(target: str, model: str) -> Sequence[Comparison]:
    runners = torch_runners(target_or_skip(target), only=suffixes(target, model))
    return tuple(verify_stored(model, runners, backend=target, long=False))  # test_long_contexts.py judges those


def suffixes(target: str, model: str) -> list[str]:
    """Variants that are judged; packed matrices have goldens of their own."""
    if target in CPU and not (model == WHOLE and target in WHOLE_IN):
        return [*EVERYWHERE[target]]
    return [suffix for suffix in VARIANTS if suffix != "-packed" and (suffix != "-compiled" or target in CUDA)]
