"""Rows of checkpoints 15 to 20 of every backend, and what must be among them."""

from collections.abc import Iterator
from functools import cache

from helpers.stored_goldens import training_golden_of, training_weights_of
from helpers.torch_targets import target_or_skip
from llorch.judging.expectations.training import compare_numpy
from llorch.judging.goldens.training import ADAPTER_FILES
from llorch.judging.runners.numpy import BACKENDS, FLOAT64
from llorch.judging.runners.training_torch import VARIANTS, compare_torch
from llorch.judging.types import Comparison
from llorch.stages.comparison import PASS

WIDE = FLOAT64
ON_NUMPY = (*BACKENDS, WIDE)
TARGETS = ("torch-cpu-float32", "torch-cpu-float64", "torch-cpu-bfloat16")
ON_CUDA = ("torch-cuda-float32", "torch-cuda-bfloat16")
NOT_ON_TORCH = ("learning_rate", "merged_weight", "exported_logits")
AFTER_STEPS = ("grad_norm", "first_moment", "second_moment", "parameters")  # groups of which bfloat16 shows step 1


@cache
def comparisons(model: str, target: str) -> list[Comparison]:
    weights, golden = training_weights_of(model), training_golden_of(model)
    if target != "numpy":
        return list(compare_torch(model, weights, golden, target_or_skip(target)))
    return list(compare_numpy(model, weights, golden))


def backends(targets: tuple[str, ...] = TARGETS) -> list[str]:
    """Backends that checkpoints are judged on."""
    return [
        *(ON_NUMPY if targets == TARGETS else ()),
        *(f"{target}{suffix}" for target in targets for suffix in VARIANTS),
    ]


def expected(backend: str, model: str) -> Iterator[str]:
    """Every comparison that the names in the golden's file allow, worked out without the judge."""
    names, prefix = training_golden_of(model).arrays, "truth/{}/"
    for mode in ("isolated", "chained"):
        of_mode = {name.removeprefix(prefix.format(mode)) for name in names if name.startswith(prefix.format(mode))}
        files = {name.partition("/")[2] for name in names if "exported_logits" in name and mode == "chained"}
        left_out = {"numpy": (), "numpy-float32": ("exported_logits",), WIDE: ("exported_logits",)}
        for text in of_mode | files:
            (engine,) = [engine for engine in ("peft", "llamacpp", "transformers") if f"{engine}/{text}" in names]
            stage = next(part for part in text.partition("/")[2].split(".") if not part[1:].isdigit())
            if stage in left_out.get(backend, NOT_ON_TORCH):
                continue
            if "bfloat16" in backend and mode == "chained" and not_shown_in_half(stage, text):
                continue
            yield f"{mode} {'peft-float64' if 'float64' in backend else engine} {text}"


def not_shown_in_half(stage: str, text: str) -> bool:
    """What follows from parameters that a step moved by the sign of a gradient near zero."""
    later = stage in AFTER_STEPS and not text.startswith("step 1/")
    return later or stage in ("parameters", "norm_curve")


def require_all(number: str, backend: str, model: str) -> list[Comparison]:
    """Every comparison of a checkpoint was made on a backend, and passes."""
    target = "numpy" if backend in ON_NUMPY else backend.removesuffix("-trainer")
    every = [c for c in comparisons(model, target) if c.backend == backend]
    found = [f"{c.mode} {c.engine} {c.stage_ref.run}/{c.stage_ref.key}" for c in every if c.mode != "exact"]
    assert sorted(found) == sorted(expected(backend, model))
    mine = [c for c in every if c.stage_ref.checkpoint == number]
    files = [c.stage_ref.name for c in mine if c.mode == "exact"]
    assert files == ([f"adapter_file.{kind}" for kind in ADAPTER_FILES] if (number, backend) == ("20", "numpy") else [])
    bad = [c for c in mine if c.verdict != PASS]
    assert not bad, f"{len(bad)} of {len(mine)} rows fail, first: {bad[0]}"
    return mine
