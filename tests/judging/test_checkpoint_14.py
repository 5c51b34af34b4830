"""Checkpoint 14: checkpoints 00 to 12 of every built-in model on the torch path, against the goldens of both engines.

pytest -k checkpoint_14         all; what needs CUDA says NOT RUN where there is none
pytest -k "checkpoint_14 and bfloat16 and micro-qwen3"
"""

from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest
from helpers.kept_suites import compare_torch as rows
from helpers.stored_rows import WHOLE, suffixes
from helpers.torch_targets import CPU, CUDA

from llorch.families.config import ModelConfig
from llorch.files import open_weights
from llorch.judging.goldens.float64_reference import FLOAT64_REFERENCE
from llorch.judging.goldens.forward import ENGINES, SAMPLINGS
from llorch.judging.runners.torch import VARIANTS
from llorch.judging.tolerances.forward import MATHEMATICS, SCORES
from llorch.judging.types import Comparison
from llorch.ops.compiled.library import library
from llorch.runtime.builtin import BUILTIN, builtin_path
from llorch.stages.comparison import PASS, TIE
from llorch.stages.table import STAGES

# In bfloat16 `llorch verify --backend torch` judges five models in every variant: a step of `.ci/run`.
SMALLEST = pytest.mark.nightly_cases(but=["*micro-llama"])
IN_LAYERS = {stage.name for stage in STAGES if stage.in_layer}


@cache
def config_of(model: str) -> ModelConfig:
    return open_weights(builtin_path(model)).config


def compared_stages(config: ModelConfig, target: str, variant: str) -> list[str]:
    hidden = VARIANTS[variant].hidden
    if hidden is None:  # compiled attention has these dtypes
        compiled = library() is not None and target in ("torch-cpu-float32", "torch-cpu-bfloat16")
        hidden = SCORES if compiled else frozenset()
    return [s.name for s in STAGES if s.applies_to(config) and s.name not in hidden]


def expected(target: str, variant: str, model: str) -> Iterator[tuple[str, str, str, str]]:
    """Checkpoint, mode, stage and engine of every comparison of one backend."""
    config = config_of(model)
    if variant == suffixes(target, model)[0]:  # once per target
        yield "00", "exact", "tensors", "reader"
        yield "00", "exact", "token_ids", "llamacpp"
    for engine in ENGINES if not target.endswith("float64") else (FLOAT64_REFERENCE,):
        for stage in (stage for stage in STAGES if stage.name in compared_stages(config, target, variant)):
            yield stage.checkpoint, "isolated", stage.name, engine
            yield stage.checkpoint, "chained", stage.name, engine
            yield "03", "decode", stage.name, engine
        yield "09", "chained", "selected_logits", engine
        yield "10", "exact", "argmax", engine
        for name in SAMPLINGS:
            yield "11", "isolated", f"probabilities.{name}", engine
        yield "12", "exact", "generation", engine


@SMALLEST
@pytest.mark.parametrize(
    ("target", "suffix", "model"),
    [(target, suffix, model) for target, model in product(CPU, BUILTIN) for suffix in suffixes(target, model)],
    ids=lambda part: part or "plain",
)
def test_checkpoint_14(target: str, suffix: str, model: str):
    require_all(target, suffix, model)


@pytest.mark.gpu
@pytest.mark.parametrize("model", BUILTIN)
@pytest.mark.parametrize(("target", "suffix"), [(t, s) for t in CUDA for s in suffixes(t, WHOLE)])
def test_checkpoint_14_on_cuda(target: str, suffix: str, model: str):
    require_all(target, suffix, model)


def require_all(target: str, suffix: str, model: str) -> None:
    """Every comparison was made, and passes."""
    found = [c for c in rows(target, model) if belongs(c, target, suffix, model)]
    expected_keys = {*expected(target, suffix, model)}
    assert {(c.stage_ref.checkpoint, c.mode, c.stage_ref.name, c.engine) for c in found} == expected_keys
    good = (PASS, TIE) if target.endswith("16") else (PASS,)
    bad = [c for c in found if c.verdict not in good]
    assert not bad, f"{len(bad)} of {len(found)} rows fail, first: {bad[0]}"


def belongs(comparison: Comparison, target: str, suffix: str, model: str) -> bool:
    """Rows of a variant; those of the file itself are the first one's."""
    of_the_file = comparison.stage_ref.name in ("tensors", "token_ids")
    return suffix == suffixes(target, model)[0] if of_the_file else comparison.backend == f"{target}{suffix}"


@SMALLEST
@pytest.mark.parametrize("model", BUILTIN)
@pytest.mark.parametrize("target", CPU)
def test_checkpoint_14_rows_are_all_looked_at(target: str, model: str):
    backends = {c.backend for c in rows(target, model) if c.stage_ref.name not in ("tensors", "token_ids")}
    assert backends == {f"{target}{suffix}" for suffix in suffixes(target, model)}


@SMALLEST
@pytest.mark.parametrize("model", BUILTIN)
@pytest.mark.parametrize("target", CPU)
def test_checkpoint_14_rows_cover_every_layer_and_case(target: str, model: str):
    n_layers = config_of(model).n_layers
    places: dict[tuple[str, str, str], set[tuple[str, int | None]]] = {}
    for comparison in rows(target, model):
        if comparison.mode in ("isolated", "chained") and comparison.stage_ref.name in IN_LAYERS:
            place = places.setdefault((comparison.backend, comparison.stage_ref.name, comparison.mode), set())
            place.add((comparison.stage_ref.run, comparison.stage_ref.layer))
    for found in places.values():
        assert found == {(case, layer) for case in ("near", "far") for layer in range(n_layers)}


@SMALLEST
@pytest.mark.parametrize("model", BUILTIN)
@pytest.mark.parametrize("target", CPU)
def test_checkpoint_14_ties_are_of_half_precision_alone(target: str, model: str):
    ties = [c for c in rows(target, model) if c.verdict == TIE]
    assert {c.stage_ref.name for c in ties} <= ({"generation", "argmax"} if target.endswith("16") else set())


@SMALLEST
@pytest.mark.parametrize("model", BUILTIN)
def test_checkpoint_14_float64_error_is_far_below_its_tolerance(model: str):
    every = [c for c in rows("torch-cpu-float64", model) if c.mode != "exact"]
    assert {c.tolerance.error for c in every if c.stage_ref.n_cached < 7} == {0.0, MATHEMATICS.error}
    assert max(c.tolerance.error for c in every) <= 1e-11  # of one token alone
    assert max(c.difference.error for c in every) < MATHEMATICS.error / 4
