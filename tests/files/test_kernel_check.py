from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.ggml_kernels import NEEDS_GGML
from helpers.refusals import refuses

import llorch
from llorch.files import kernel_check
from llorch.files.kernel_check import require_kernel
from llorch.files.packed import Packed
from llorch.files.quant import GGMLType, decode
from llorch.judging.expectations.quantised_models import matrix_bytes, write_model
from llorch.ops.compiled.ggml import NoKernels
from llorch.ops.numerics import GGML, GGML_KERNELS

pytestmark = NEEDS_GGML
SHAPE = (24, 512)
IDS = [5, 17, 33, 60, 2, 42]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_check, "_checked", set())


def packed(kind: GGMLType) -> Packed:
    return Packed("blk.0.attn_q.weight", Path("m.gguf"), matrix_bytes(kind, SHAPE, key=kind.name), kind, SHAPE)


def test_a_right_kernel_is_checked_once(monkeypatch: pytest.MonkeyPatch):
    require_kernel(packed(GGMLType.Q4_K))
    require_kernel(packed(GGMLType.Q5_1))
    assert kernel_check._checked == {GGMLType.Q4_K, GGMLType.Q5_1}
    monkeypatch.setattr(kernel_check, "require_product", pytest.fail)
    require_kernel(packed(GGMLType.Q4_K))


def test_a_kernel_with_another_product_is_refused_by_its_type(monkeypatch: pytest.MonkeyPatch):
    shifted = lambda self: decode(self.raw, self.ggml, self.shape)[::-1]  # noqa: E731
    monkeypatch.setattr(Packed, "tiles", lambda self: iter([(0, shifted(self))]))
    with refuses(NoKernels, "ggml's product of Q4_K"):
        require_kernel(packed(GGMLType.Q4_K))
    assert kernel_check._checked == set()


def test_a_weight_that_is_not_finite_is_named():
    stored = packed(GGMLType.F16)
    values = stored.raw.copy().view("<f2").reshape(SHAPE)
    values[3, 5] = np.inf
    with refuses("NonFinite", "(3, 5)", where="blk.0.attn_q.weight"):
        require_kernel(replace(stored, raw=values.reshape(-1).view(np.uint8)))


@pytest.mark.parametrize("name", ["Q4_K_M", "F16"])
def test_all_types_of_a_model_are_checked_and_its_logits_are_those_of_llorch_s_own_form(name: str, tmp_path: Path):
    path = write_model(name, tmp_path)
    by_ggml = llorch.load(path, numerics=GGML_KERNELS)
    kinds = {GGMLType.Q4_K, GGMLType.Q6_K} if name == "Q4_K_M" else {GGMLType.F16}
    assert kernel_check._checked == kinds
    own = llorch.load(path, numerics=GGML).forward(IDS)
    logits = by_ggml.forward(IDS)
    assert np.abs(logits - own).max() < 0.02 * np.abs(own).max()  # flips
    assert not np.array_equal(logits, own)
