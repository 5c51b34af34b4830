"""Teeth of checkpoint 13: every known mistake goes red by far and is named; broken code turns its rows red."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from planted_quantised import QuantisedSituation, golden, situations, variant

from llorch import forward, quantised, verify_quantised
from llorch.cache import KVCache
from llorch.compare import Tolerance, measure
from llorch.config import ModelConfig
from llorch.diagnose import VISIBLE, rank
from llorch.mistakes import IN_PRODUCTS, QUANTISED, Mistake, QuantisedInputs
from llorch.ops.rounding import VariantName
from llorch.quantised_models import MODELS, write_model
from llorch.verifier import FAIL, PASS, Row
from llorch.verify_quantised import decode_rows, file_row, product_rows, rounding_rows
from llorch.weights import Weights, matrix, packed
from llorch.weights.quant import GGMLType

PURE = [name for name in MODELS if name != "Q4_K_M"]


def by_name(mistake: Mistake) -> str:
    return f"checkpoint_13_{mistake.name}"


def test_every_kind_of_mistake_is_known():
    assert len(QUANTISED) > 30
    assert {step for mistake in QUANTISED for step in mistake.stages} == IN_PRODUCTS.keys()
    assert {case for mistake in QUANTISED for case in mistake.cases} == {*PURE}


@pytest.mark.parametrize("mistake", QUANTISED, ids=by_name)
def test_mistake_goes_red_and_is_named(mistake: Mistake[QuantisedInputs]):
    named = 0
    for where in situations(mistake):
        _, want = where.shown()
        made = where.made()
        wrong = next(array for known, array in made.wrong if known is mistake)
        over = measure(wrong, want).over(where.tolerance)
        assert over >= VISIBLE, f"{where}: {over:.1f} times the tolerance"
        names = [suspect.mistake.name for suspect in rank(wrong, made, tolerance=where.tolerance) if suspect.named]
        if np.isfinite(wrong).all():
            assert names == [mistake.name], f"{where}: named {names}"
            named += 1
    assert named, "nowhere does it make numbers that could be named"


@pytest.mark.parametrize("kind", PURE)
@pytest.mark.parametrize("step", IN_PRODUCTS)
def test_what_ggml_made_is_never_accused(step: str, kind: str):
    where = QuantisedSituation(step, GGMLType[kind])
    _, want = where.shown()
    assert measure(where.made().right, want).within(where.tolerance)
    assert rank(want, where.made(), tolerance=where.tolerance) == []


@pytest.mark.parametrize("kind", PURE)
def test_the_product_that_mistakes_start_from_is_the_right_one(kind: str):
    inputs, want = QuantisedSituation("product", GGMLType[kind]).shown()
    assert measure(inputs.product(), want).within(Tolerance(1e-6, 4e-6))


def test_an_unknown_mistake_gets_suspects_but_no_name(rng: np.random.Generator):
    where = QuantisedSituation("product", GGMLType.Q4_K)
    right = where.made().right
    suspects = rank(
        right * (1 + 1e-3 * rng.standard_normal(right.shape, np.float32)), where.made(), tolerance=where.tolerance
    )
    assert suspects
    assert not any(suspect.named for suspect in suspects)


def judged(name: str, folder: Path) -> list[Row]:
    return list(product_rows(name, write_model(name, folder), golden()))


def red(rows: list[Row], mode: str) -> set[str]:
    """Stages of the first layer that fail by far."""
    bad = [row for row in rows if row.verdict == FAIL and row.mode == mode and row.layer == 0]
    return {row.stage for row in bad if row.error >= VISIBLE * row.tolerance}


PRODUCTS = {"q_proj", "k_proj", "v_proj", "attn_out", "ffn_gate", "ffn_up", "ffn_out"}


def when_narrow(wrong: Callable, right: Callable) -> Callable:
    """Broken for float32, and right for the float64 truth."""
    return lambda x, *rest: (wrong if x.dtype == np.float32 else right)(x, *rest)


@pytest.mark.parametrize("name", ["BF16", "Q8_0", "Q4_K_M"])
def test_activations_that_are_not_rounded_turn_every_product_red(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert not red(judged(name, tmp_path), "isolated")
    monkeypatch.setattr(matrix, "round_activations", when_narrow(lambda x, kind: x, matrix.round_activations))
    assert red(judged(name, tmp_path), "isolated") == PRODUCTS


def test_sums_that_are_not_rounded_turn_every_product_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    exact = lambda x: matrix.round_activations(x, "Q8_1").reshape(len(x), -1, 32).sum(-1)  # noqa: E731
    monkeypatch.setattr(matrix, "block_sums", when_narrow(exact, matrix.block_sums))
    assert red(judged("Q5_1", tmp_path), "isolated") == PRODUCTS


def test_packed_matrices_are_judged_apart_from_decoded_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = packed.Packed.tiles
    monkeypatch.setattr(packed.Packed, "tiles", lambda this: ((start, tile[::-1]) for start, tile in right(this)))
    rows = [row for row in judged("Q6_K", tmp_path) if row.verdict == FAIL and row.mode == "isolated"]
    assert {row.backend for row in rows} == {"numpy-ggml-packed"}


def test_a_float16_cache_where_float32_is_asked_for_is_red_although_flips_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def narrow(config: ModelConfig, dtype: type[np.floating], **rest: int) -> KVCache:
        return KVCache(config, np.float16 if dtype is np.float32 else dtype, **rest)

    monkeypatch.setattr(quantised, "KVCache", narrow)
    for name in ("F16", "Q4_1", "Q4_K_M"):
        assert "attn_context" in red(judged(name, tmp_path), "chained")


def test_a_wrong_norm_is_red_although_flips_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = forward.rms_norm
    wrong = lambda x, weight, *, eps: right(x, weight, eps=eps * 10 if x.dtype == np.float32 else eps)  # noqa: E731
    monkeypatch.setattr(forward, "rms_norm", wrong)
    assert "attn_norm" in red(judged("Q8_0", tmp_path), "chained")


def test_one_wrong_bit_of_decoding_is_red(monkeypatch: pytest.MonkeyPatch):
    assert {row.verdict for row in decode_rows(golden())} == {PASS}
    right = verify_quantised.decode

    def nearly(raw: np.ndarray, kind: GGMLType, shape: tuple[int, ...]) -> np.ndarray:
        values = right(raw, kind, shape)
        values[1, 0] = np.nextafter(values[1, 0], np.float32(9))
        return values

    monkeypatch.setattr(verify_quantised, "decode", nearly)
    rows = list(decode_rows(golden()))
    assert {row.verdict for row in rows} == {FAIL}
    assert all("1 of" in row.note and "the first in block 1" in row.note for row in rows)


def test_nan_where_ggml_has_a_number_is_red(monkeypatch: pytest.MonkeyPatch):
    right = verify_quantised.decode
    monkeypatch.setattr(verify_quantised, "decode", lambda *what: right(*what) * np.float32("nan"))
    assert {row.verdict for row in decode_rows(golden())} == {FAIL}


@pytest.mark.parametrize("other", ["neon", "generic"])
def test_another_variant_of_rounding_is_red(other: VariantName, monkeypatch: pytest.MonkeyPatch):
    assert {row.verdict for row in rounding_rows(golden())} == {PASS}
    right = verify_quantised.quantize_blocks
    monkeypatch.setattr(verify_quantised, "quantize_blocks", lambda rows, kind, _: right(rows, kind, other))
    verdicts = {row.stage: row.verdict for row in rounding_rows(golden())}
    assert verdicts[f"rounding.Q8_0.{variant()}"] == verdicts[f"rounding.Q8_1.{variant()}"] == FAIL
    assert verdicts[f"rounding.Q8_K.{variant()}"] == PASS  # one algorithm everywhere


def test_a_model_of_other_bytes_is_red_and_said_so(tmp_path: Path):
    path = write_model("Q2_0", tmp_path)
    assert file_row("Q2_0", path, golden()).verdict == PASS
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    row = file_row("Q2_0", path, golden())
    assert row.verdict == FAIL
    assert row.note.startswith("made ")


def test_products_with_swapped_matrices_are_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = Weights.layer
    monkeypatch.setattr(Weights, "layer", lambda weights, index: right(weights, 1 - index))
    assert red(judged("IQ3_S", tmp_path), "isolated") == PRODUCTS
