"""ggml's kernels are judged by the goldens and by llorch's own form; each sees what the other cannot."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers.ggml_kernels import NEEDS_GGML
from helpers.stored_goldens import quantised_golden

from llorch.files import matrix
from llorch.judging.expectations.own_form import FLOAT32, FLOAT64
from llorch.judging.expectations.quantised import stage_rows
from llorch.judging.expectations.quantised_models import write_model
from llorch.judging.types import Comparison
from llorch.ops.compiled.ggml import GgmlMatrix
from llorch.ops.rounding import round_activations
from llorch.stages.comparison import FAIL, PASS

pytestmark = NEEDS_GGML
PRODUCTS = {"q_proj", "k_proj", "v_proj", "attn_out", "ffn_gate", "ffn_up", "ffn_out"}


def rows(folder: Path, name: str = "Q4_K_M") -> Sequence[Comparison]:
    return list(stage_rows(name, write_model(name, folder), quantised_golden(), "ggml"))


@pytest.mark.parametrize("name", ["Q4_K_M", "Q5_1", "F16"])
def test_every_product_agrees_with_llama_cpp_and_with_the_own_form(name: str, tmp_path: Path):
    comparisons = rows(tmp_path, name)
    assert {c.verdict for c in comparisons} == {PASS}
    assert {c.backend for c in comparisons} == {"numpy-ggml-kernels"}
    for engine in (FLOAT32, FLOAT64):
        places = [(c.stage_ref.name, c.stage_ref.layer) for c in comparisons if c.engine == engine]
        expected = {(stage, layer) for stage in PRODUCTS for layer in (0, 1)} | {("logits", None)}
        assert (len(places), set(places)) == (len(expected), expected)


def failing(comparisons: Sequence[Comparison]) -> dict[str, set[str]]:
    isolated = [c for c in comparisons if c.verdict == FAIL and c.mode == "isolated"]
    return {
        engine: {c.stage_ref.name for c in isolated if c.engine == engine} for engine in {c.engine for c in isolated}
    }


def test_a_wrong_kernel_is_red_for_every_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = GgmlMatrix.multiply
    monkeypatch.setattr(GgmlMatrix, "multiply", lambda self, x: right(self, x) * np.float32(1 + 1e-5))
    monkeypatch.setattr("llorch.files.kernel_check._checked", {*matrix.ACTIVATION_TYPE})  # a check would refuse it
    assert failing(rows(tmp_path)) == dict.fromkeys(("llamacpp", FLOAT32, FLOAT64), PRODUCTS | {"logits"})


def test_another_rounding_than_llorch_s_is_red_although_llama_cpp_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("llorch.files.kernel_check._checked", {*matrix.ACTIVATION_TYPE})
    coarse = lambda x, kind: round_activations(x, kind) * x.dtype.type(1 + 1e-5)  # noqa: E731
    monkeypatch.setattr(matrix, "round_activations", coarse)
    assert failing(rows(tmp_path)) == dict.fromkeys((FLOAT32, FLOAT64), PRODUCTS | {"logits"})
