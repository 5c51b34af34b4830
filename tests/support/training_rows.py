"""Rows of checkpoints 15 to 20 of every backend, and what must be among them."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache

import pytest
from planted_training import judge_of, training_golden_of, weights_of, wide_judge_of
from torch_targets import on

from llorch.verify.torch_verify_training import LEFT_OUT, VARIANTS, judge_for, torch_rows
from llorch.verify.training.goldens import ADAPTER_FILES, MODELS
from llorch.verify.training.judge import OF_EXPORTS
from llorch.verify.training.stages import Key
from llorch.verify.verifier import BACKENDS, FLOAT64, PASS, Row

WIDE = FLOAT64
ON_NUMPY = (*BACKENDS, WIDE)
TARGETS = ("torch-cpu-float32", "torch-cpu-float64", "torch-cpu-bfloat16")
ON_CUDA = ("torch-cuda-float32", "torch-cuda-bfloat16")
ALONE = ("learning_rate", "merged_weight")  # groups that have no chain
IN_CHAIN = (
    "adapted_logits",
    "loss_curve",
    "norm_curve",
    "merged_logits",
    *OF_EXPORTS,
)  # groups whose one input is the whole run
Place = tuple[str, str, int | None, str, str]  # mode, case, layer, stage, producer


@cache
def rows(model: str, target: str) -> list[Row]:
    if target != "numpy":
        judge = judge_for(on(target).dtype_name, model, weights_of(model), training_golden_of(model))
        return list(torch_rows(judge, on(target)))
    made = [row for backend, how in BACKENDS.items() for row in judge_of(model).numpy_rows(backend, how)]
    return [*made, *wide_judge_of(model).numpy_rows(WIDE, nullcontext)]


def backends(number: str, targets: tuple[str, ...] = TARGETS) -> list[str]:
    """Backends that a checkpoint is judged on."""
    torch = [f"{target}{suffix}" for target in targets for suffix in VARIANTS]
    return [*(BACKENDS if targets == TARGETS else ()), *torch]


def places(number: str) -> list[object]:
    return [
        pytest.param(backend, model, id=f"checkpoint_{number}-{backend}-{model}")
        for backend in backends(number)
        for model in MODELS
    ]


def expected(number: str, backend: str, model: str) -> Iterator[Place]:
    """Every comparison of one checkpoint that a golden allows, worked out without the judge."""
    left_out = {"numpy": (), "numpy-float32": OF_EXPORTS, WIDE: OF_EXPORTS}.get(backend, LEFT_OUT)
    for producer, arrays in training_golden_of(model).arrays.items():
        for key in map(Key.of, arrays):
            if key.in_table and key.group.checkpoint == number and key.group.name not in left_out:
                for mode in modes_of(key):
                    if "bfloat16" in backend and not_shown_in_half(mode, key):
                        continue
                    yield mode, key.case, key.layer, key.stage, "peft-float64" if "float64" in backend else producer


def modes_of(key: Key) -> tuple[str, ...]:
    name = key.group.name
    if name in ALONE or (name, key.case) == ("lora_delta", "rslora"):
        return ("isolated",)
    if name in IN_CHAIN or key.case in ("zero_b", "step 10"):
        return ("chained",)
    return ("isolated", "chained")


def not_shown_in_half(mode: str, key: Key) -> bool:
    """What follows from parameters that a step moved by the sign of a gradient near zero."""
    later = key.group.checkpoint == "18" and key.case != "step 1"
    return mode == "chained" and (later or key.group.name in ("parameters", "norm_curve"))


def require_all(number: str, backend: str, model: str) -> list[Row]:
    """Every comparison of a checkpoint was made on a backend, and passes."""
    target = "numpy" if backend in ON_NUMPY else backend.removesuffix("-trainer")
    mine = [row for row in rows(model, target) if (row.checkpoint, row.backend) == (number, backend)]
    found = [(row.mode, row.case, row.layer, row.stage, row.producer) for row in mine if row.mode != "exact"]
    assert sorted(map(str, found)) == sorted(map(str, expected(number, backend, model)))
    files = [row.stage for row in mine if row.mode == "exact"]
    assert files == ([f"adapter_file.{kind}" for kind in ADAPTER_FILES] if (number, backend) == ("20", "numpy") else [])
    bad = [row for row in mine if row.verdict != PASS]
    assert not bad, f"{len(bad)} of {len(mine)} rows fail, first: {bad[0]}"
    return mine
