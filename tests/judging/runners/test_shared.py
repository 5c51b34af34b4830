"""Passes that share the matrices of a large model: the same rows, and each matrix decoded once a layer for all."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers.stored_goldens import quantised_golden

from llorch.files import compiled, open_weights
from llorch.files.packed import Packed
from llorch.judging.expectations.quantised import suite_of
from llorch.judging.expectations.quantised_models import write_model
from llorch.judging.goldens.quantised import CASE
from llorch.judging.runner_check import RunnerCheck
from llorch.judging.runners.numpy import GgmlRunner
from llorch.judging.runners.shared import SharedWeights
from llorch.judging.types import Comparison
from llorch.ops.compiled.products import CompiledMatrix
from llorch.ops.numerics import GGML
from llorch.stages.comparison import FAIL

NAME = "Q4_K"
SPOILT = "blk.1.ffn_up.weight"


@pytest.fixture
def weights(tmp_path: Path) -> SharedWeights:
    return SharedWeights(open_weights(write_model(NAME, tmp_path)).using(GGML))


def comparisons(weights: SharedWeights, *, shared: bool = True) -> list[Comparison]:
    same = weights if shared else open_weights(weights.path).using(GGML, packed=True)
    suite = suite_of(NAME, same, quantised_golden())
    runner = GgmlRunner(same, {CASE: quantised_golden().traces[NAME]}, {CASE: suite.tolerances(CASE)})
    return [*(check := RunnerCheck(suite, runner)).stage_rows(), *check.decode_rows()]


def isolated_failures(weights: SharedWeights) -> set[tuple[str, int | None]]:
    failed = [c.stage_ref for c in comparisons(weights) if c.mode == "isolated" and c.verdict == FAIL]
    return {(stage_ref.name, stage_ref.layer) for stage_ref in failed}


def test_rows_are_those_of_passes_that_share_nothing(weights: SharedWeights):
    assert [c.record() for c in comparisons(weights)] == [c.record() for c in comparisons(weights, shared=False)]


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the C library away, which multiplies from the blocks and decodes nothing that passes could share."""
    monkeypatch.setattr(compiled, "is_available", lambda: False)


@pytest.mark.usefixtures("without_library")
def test_a_matrix_is_decoded_as_often_as_one_pass_comes_by(weights: SharedWeights, monkeypatch: pytest.MonkeyPatch):
    decoded, told = Counter[str](), list[str]()
    right = Packed.decode
    monkeypatch.setattr(Packed, "decode", lambda self: decoded.update([self.name]) or right(self))
    weights._decoded._progress = told.append
    comparisons(weights)
    assert set(decoded.values()) == {4}  # stages and decoding, each with passes that come by twice
    n = weights.config.n_layers
    assert [line.split(",")[:2] for line in told] == [
        [f"round {k}", f" layer {i} of {n}"] for k in (1, 2, 3, 4) for i in range(n + 1)
    ]
    assert re.search(r"\d+ s\b", told[1])


@pytest.mark.usefixtures("without_library")
def test_a_tile_that_is_decoded_wrongly_is_red_wherever_it_is_used(
    weights: SharedWeights, monkeypatch: pytest.MonkeyPatch
):
    right = Packed.decode
    monkeypatch.setattr(Packed, "decode", lambda self: right(self) * np.float32(1 + 1e-3 * (self.name == SPOILT)))
    assert isolated_failures(weights) == {("ffn_up", 1)}


def test_a_product_of_blocks_that_is_wrong_is_red(weights: SharedWeights, monkeypatch: pytest.MonkeyPatch):
    right, blocks = CompiledMatrix.multiply, weights.source.packed(SPOILT).by_row

    def multiply(self: CompiledMatrix, x: np.ndarray) -> np.ndarray:
        return right(self, x) * np.float32(1 + 1e-3 * np.array_equal(self.codes, blocks))

    monkeypatch.setattr(CompiledMatrix, "multiply", multiply)
    assert isolated_failures(weights) == {("ffn_up", 1)}


def test_alone_nothing_is_kept(weights: SharedWeights):
    suite = suite_of(NAME, weights, quantised_golden())
    suite.tolerances(CASE).chained("logits")
    assert not weights._decoded.matrices
