"""Faults in the code that computes with stored types turn rows of checkpoint 13 red.

The known mistakes are in `test_teeth_stages.py`. The tests below the table compare bits, or ask which backend is red.
"""

from pathlib import Path

import numpy as np
import pytest
from faults.fault import InjectedFault, assert_seen
from faults.table import PACKED
from helpers.refusals import assert_tells
from helpers.stored_goldens import quantised_golden, rounding_variant

from llorch.files import packed
from llorch.files.quant import GGMLType
from llorch.judging.expectations import quantised as verify_quantised
from llorch.judging.expectations.quantised import compare_roundings, decode_rows, stage_rows
from llorch.judging.expectations.quantised_models import write_model
from llorch.ops.rounding import VariantName
from llorch.stages.comparison import FAIL, PASS


@pytest.mark.slow_cases(
    "a-step-one-position-on-Q4_K_M", "activation-of-1.001-in-a-step-Q4_K_M", "base-of-1.00001-Q8_0",
    "cache-of-zeros-Q8_0", "cache-of-zeros-in-a-step-*", "context-lost-after-a-cache-*", "eps-of-1.1-*",
)  # fmt: skip
@pytest.mark.parametrize("fault", PACKED, ids=str)
def test_a_fault_is_red_where_it_is(fault: InjectedFault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert_seen(fault, monkeypatch, tmp_path)


def test_packed_matrices_are_checked_separately_from_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = packed.Packed.tiles
    monkeypatch.setattr(packed.Packed, "tiles", lambda matrix: ((start, tile[::-1]) for start, tile in right(matrix)))
    comparisons = stage_rows("Q6_K", write_model("Q6_K", tmp_path), quantised_golden())
    assert {c.backend for c in comparisons if c.verdict == FAIL and c.mode == "isolated"} == {"numpy-ggml-packed"}


def test_one_wrong_bit_of_decoding_is_red(monkeypatch: pytest.MonkeyPatch):
    assert {c.verdict for c in decode_rows(quantised_golden())} == {PASS}
    right = verify_quantised.decode

    def nearly(raw: np.ndarray, kind: GGMLType, shape: tuple[int, ...]) -> np.ndarray:
        values = right(raw, kind, shape)
        values[1, 0] = np.nextafter(values[1, 0], np.float32(9))
        return values

    monkeypatch.setattr(verify_quantised, "decode", nearly)
    comparisons = list(decode_rows(quantised_golden()))
    assert {c.verdict for c in comparisons} == {FAIL}
    for comparison in comparisons:
        assert_tells(comparison.note, f"1 of {quantised_golden().blocks[f'{comparison.model}.values'].size}", "block 1")


def test_nan_where_ggml_has_a_number_is_red(monkeypatch: pytest.MonkeyPatch):
    right = verify_quantised.decode
    monkeypatch.setattr(verify_quantised, "decode", lambda *arguments: right(*arguments) * np.float32("nan"))
    assert {c.verdict for c in decode_rows(quantised_golden())} == {FAIL}


@pytest.mark.parametrize("variant", ["neon", "generic"])
def test_another_variant_of_rounding_is_red(variant: VariantName, monkeypatch: pytest.MonkeyPatch):
    assert {c.verdict for c in compare_roundings(quantised_golden())} == {PASS}
    right = verify_quantised.quantize_blocks
    monkeypatch.setattr(verify_quantised, "quantize_blocks", lambda rows, kind, _: right(rows, kind, variant))
    verdicts = {c.stage_ref.name: c.verdict for c in compare_roundings(quantised_golden())}
    assert verdicts[f"rounding.Q8_0.{rounding_variant()}"] == verdicts[f"rounding.Q8_1.{rounding_variant()}"] == FAIL
    assert verdicts[f"rounding.Q8_K.{rounding_variant()}"] == PASS  # one algorithm everywhere
