"""Checkpoint 14: checkpoints 00 to 12 of every built-in model on the torch path, against the goldens of both engines.

pytest -k checkpoint_14         all; what needs CUDA says NOT RUN where there is none
pytest -k "checkpoint_14 and bfloat16 and micro-qwen3"
"""

from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest
from runs.kept_suites import torch_rows as rows
from runs.stored_rows import WHOLE, suffixes
from runs.torch_targets import CPU, CUDA

from llorch.families.config import ModelConfig
from llorch.files import open_weights
from llorch.judging.goldens.float64_reference import WITNESS
from llorch.judging.goldens.forward import PRODUCERS, SAMPLINGS
from llorch.judging.judge import Comparison
from llorch.judging.runners.torch import VARIANTS
from llorch.judging.tolerances.forward import MATHEMATICS, SCORES
from llorch.pytorch.kernels.cpu.library import library
from llorch.runtime.builtin import BUILTIN, builtin_path
from llorch.stages.comparison import PASS, TIE
from llorch.stages.table import STAGES

# In bfloat16 `llorch verify --backend torch` judges five models in every variant: a step of `.ci/run`.
SMALLEST = pytest.mark.nightly_cases(but=["*micro-llama"])
IN_LAYERS = {stage.name for stage in STAGES if stage.in_layer}


@cache
def config_of(model: str) -> ModelConfig:
    return open_weights(builtin_path(model)).config


def shown(config: ModelConfig, target: str, variant: str) -> list[str]:
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
    for producer in PRODUCERS if not target.endswith("float64") else (WITNESS,):
        for stage in (stage for stage in STAGES if stage.name in shown(config, target, variant)):
            yield stage.checkpoint, "isolated", stage.name, producer
            yield stage.checkpoint, "chained", stage.name, producer
            yield "03", "decode", stage.name, producer
        yield "09", "chained", "selected_logits", producer
        yield "10", "exact", "argmax", producer
        for name in SAMPLINGS:
            yield "11", "isolated", f"probabilities.{name}", producer
        yield "12", "exact", "generation", producer


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
    found = [row for row in rows(target, model) if belongs(row, target, suffix, model)]
    want = {*expected(target, suffix, model)}
    assert {(row.checkpoint, row.mode, row.stage, row.producer) for row in found} == want
    good = (PASS, TIE) if target.endswith("16") else (PASS,)
    bad = [row for row in found if row.verdict not in good]
    assert not bad, f"{len(bad)} of {len(found)} rows fail, first: {bad[0]}"


def belongs(row: Comparison, target: str, suffix: str, model: str) -> bool:
    """Rows of a variant; those of the file itself are the first one's."""
    of_the_file = row.stage in ("tensors", "token_ids")
    return suffix == suffixes(target, model)[0] if of_the_file else row.backend == f"{target}{suffix}"


@SMALLEST
@pytest.mark.parametrize("model", BUILTIN)
@pytest.mark.parametrize("target", CPU)
def test_checkpoint_14_rows_are_all_looked_at(target: str, model: str):
    backends = {row.backend for row in rows(target, model) if row.stage not in ("tensors", "token_ids")}
    assert backends == {f"{target}{suffix}" for suffix in suffixes(target, model)}


@SMALLEST
@pytest.mark.parametrize("model", BUILTIN)
@pytest.mark.parametrize("target", CPU)
def test_checkpoint_14_rows_cover_every_layer_and_case(target: str, model: str):
    n_layers = config_of(model).n_layers
    places: dict[tuple[str, str, str], set[tuple[str, int | None]]] = {}
    for row in rows(target, model):
        if row.mode in ("isolated", "chained") and row.stage in IN_LAYERS:
            places.setdefault((row.backend, row.stage, row.mode), set()).add((row.case, row.layer))
    for found in places.values():
        assert found == {(case, layer) for case in ("near", "far") for layer in range(n_layers)}


@SMALLEST
@pytest.mark.parametrize("model", BUILTIN)
@pytest.mark.parametrize("target", CPU)
def test_checkpoint_14_ties_are_of_half_precision_alone(target: str, model: str):
    ties = [row for row in rows(target, model) if row.verdict == TIE]
    assert {row.stage for row in ties} <= ({"generation", "argmax"} if target.endswith("16") else set())


@SMALLEST
@pytest.mark.parametrize("model", BUILTIN)
def test_checkpoint_14_in_float64_is_far_below_its_limit_of_the_truth(model: str):
    every = [row for row in rows("torch-cpu-float64", model) if row.mode != "exact"]
    assert {row.tolerance for row in every if row.place.n_cached < 7} == {0.0, MATHEMATICS.error}
    assert max(row.tolerance for row in every) <= 1e-11  # of one token alone
    assert max(row.error for row in every) < MATHEMATICS.error / 4
