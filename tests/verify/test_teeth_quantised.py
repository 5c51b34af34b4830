"""Teeth of checkpoint 13: every known mistake goes red by far and is named; broken code turns its rows red."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inject.planted import named_by
from inject.planted_quantised import QuantisedSituation, golden, situations, variant
from runs.refusals import assert_tells

import llorch
from llorch import forward
from llorch.builtin import builtin_path
from llorch.cache import KVCache
from llorch.comparison import FAIL, PASS, Tolerance, measure
from llorch.config import ModelConfig
from llorch.diagnosis.mistakes import IN_PRODUCTS, QUANTISED, Mistake, QuantisedInputs
from llorch.diagnosis.mistakes.variants import VISIBLE
from llorch.files import Weights, matrix, packed
from llorch.files.quant import GGMLType
from llorch.model import Model
from llorch.numerics import GGML
from llorch.ops.rounding import VariantName
from llorch.verify.expectations import quantised as verify_quantised
from llorch.verify.expectations.quantised import decode_rows, rounding_rows, stage_rows
from llorch.verify.expectations.quantised_models import MODELS, write_model
from llorch.verify.judge import Comparison
from llorch.verify.models import verify_as_stored
from llorch.verify.runners import numpy as numpy_runner

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
        names = named_by(wrong, made, where.tolerance)
        if np.isfinite(wrong).all():
            assert names == [mistake.name], f"{where}: named {names}"
            named += 1
    assert named, "nowhere does it make numbers that could be named"


@pytest.mark.parametrize("kind", PURE)
def test_what_ggml_made_is_never_accused_and_mistakes_start_from_the_right_product(kind: str):
    for where in (QuantisedSituation(step, GGMLType[kind]) for step in IN_PRODUCTS):
        _, want = where.shown()
        assert measure(where.made().right, want).within(where.tolerance), where
        assert named_by(want, where.made(), where.tolerance) == [], where
    inputs, want = QuantisedSituation("product", GGMLType[kind]).shown()
    assert measure(inputs.product(), want).within(Tolerance(1e-6, 4e-6))


def test_an_unknown_mistake_gets_no_name(rng: np.random.Generator):
    where = QuantisedSituation("product", GGMLType.Q4_K)
    right = where.made().right
    noise = 1 + 1e-3 * rng.standard_normal(right.shape, np.float32)
    assert named_by(right * noise, where.made(), where.tolerance) == []


def judged(name: str, folder: Path) -> list[Comparison]:
    return list(stage_rows(name, write_model(name, folder), golden()))


def red(rows: list[Comparison], mode: str) -> set[str]:
    """Stages of the first layer that fail by far."""
    bad = [row for row in rows if row.verdict == FAIL and row.mode == mode and row.layer == 0]
    return {row.stage for row in bad if row.error >= VISIBLE * row.tolerance}


PRODUCTS = {"q_proj", "k_proj", "v_proj", "attn_out", "ffn_gate", "ffn_up", "ffn_out"}


@pytest.mark.parametrize("name", ["BF16", "Q8_0", "Q4_K_M"])
def test_activations_that_are_not_rounded_turn_every_product_red(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(matrix, "round_activations", lambda x, kind: x)
    assert red(judged(name, tmp_path), "isolated") == PRODUCTS


def test_sums_that_are_not_rounded_turn_every_product_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    exact = lambda x: matrix.round_activations(x, "Q8_1").reshape(len(x), -1, 32).sum(-1)  # noqa: E731
    monkeypatch.setattr(matrix, "block_sums", exact)
    assert red(judged("Q5_1", tmp_path), "isolated") == PRODUCTS


def test_packed_matrices_are_judged_apart_from_decoded_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = packed.Packed.tiles
    monkeypatch.setattr(packed.Packed, "tiles", lambda this: ((start, tile[::-1]) for start, tile in right(this)))
    rows = [row for row in judged("Q6_K", tmp_path) if row.verdict == FAIL and row.mode == "isolated"]
    assert {row.backend for row in rows} == {"numpy-ggml-packed"}


def test_a_float16_cache_where_float32_is_asked_for_is_red_although_flips_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def narrow(config: ModelConfig, dtype: type[np.floating], **rest: Any) -> KVCache:
        return KVCache(config, np.float16 if dtype is np.float32 else dtype, **rest)

    monkeypatch.setattr(numpy_runner, "KVCache", narrow)
    for name in ("F16", "Q4_1", "Q4_K_M"):
        assert "attn_context" in red(judged(name, tmp_path), "chained")


def with_cache(op: Callable, wrong: Callable) -> Callable:
    """An op of attention that is wrong where the context is longer than the pass."""
    return lambda p, other: wrong(op(p, other)) if p.shape[-1] > p.shape[-2] else op(p, other)


def of_one_token(op: Callable, wrong: Callable) -> Callable:
    return lambda x, *rest, **named: wrong(op(x, *rest, **named)) if len(x) == 1 else op(x, *rest, **named)


def kept_as_zeros(right: Callable, *, in_steps: bool) -> Callable:
    def append(cache: KVCache, layer: int, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
        context = right(cache, layer, k, v)
        kept = in_steps and context[0].shape[1] == len(k)
        return tuple(array if kept else array * 0 for array in context)

    return append


def one_position_on(cache: KVCache, n_tokens: int) -> np.ndarray:
    return cache._first_position + cache.length + np.arange(n_tokens) + (cache.length > 0)


norm, tables, context, append = forward.rms_norm, forward.rope_tables, forward.attention_context, KVCache.append
# Planted into the product -> where it has to show first, live and against what is stored.
PLANTED: dict[str, tuple[str, str, Any, str, Callable]] = {
    "eps of 1.1": ("isolated", "attn_norm", forward, "rms_norm", lambda x, w, *, eps: norm(x, w, eps=1.1 * eps)),
    "base of 1.00001": (
        "isolated", "q_rope", forward, "rope_tables", lambda *p, theta, **k: tables(*p, theta=theta * 1.00001, **k)
    ),
    "cache of zeros": ("isolated", "k_cache", KVCache, "append", kept_as_zeros(append, in_steps=False)),
    "cache of zeros in a step": ("decode", "k_cache", KVCache, "append", kept_as_zeros(append, in_steps=True)),
    "context of zeros after a cache": (
        "decode", "attn_context", forward, "attention_context", with_cache(context, lambda y: y * 0)
    ),
    "activation of 1.001 in a step": (
        "decode", "ffn_act", forward, "swiglu", of_one_token(forward.swiglu, lambda y: y * np.float32(1.001))
    ),
    "a step one position on": ("decode", "q_rope", KVCache, "next_positions", one_position_on),
}  # fmt: skip
FTYPES = {"Q8_0": 7, "Q4_K_M": 15}  # LLAMA_FTYPE_MOSTLY_*


def require_red(rows: list[Comparison], mode: str, stage: str) -> None:
    bad = {(row.mode, row.stage) for row in rows if row.verdict == FAIL}
    assert (mode, stage) in bad
    assert mode == "isolated" or {m for m, _ in bad} <= {"decode", "exact"}  # one pass over all tokens is right


@pytest.mark.plain_cases(
    "Q4_K_M-base of 1.00001",
    "Q4_K_M-cache of zeros",
    "Q8_0-a step one position on",
    "Q8_0-activation of 1.001 in a step",
)
@pytest.mark.parametrize("bug", PLANTED)
@pytest.mark.parametrize("name", FTYPES)
def test_a_bug_in_the_product_is_red(name: str, bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mode, stage, where, name_there, wrong = PLANTED[bug]
    monkeypatch.setattr(where, name_there, wrong)
    require_red(judged(name, tmp_path), mode, stage)


def live(name: str, folder: Path) -> list[Comparison]:
    """The story model, quantised by llama.cpp itself."""
    from llorch.engines.f32_copy import write_by_llamacpp

    write_by_llamacpp(builtin_path("story"), folder / "story.gguf", FTYPES[name])
    model = llorch.load(folder / "story.gguf", numerics=GGML)
    return list(verify_as_stored(model, model.tokenizer.encode("Once upon a time, a small fox found a stone")))


@pytest.mark.live
@pytest.mark.parametrize("bug", PLANTED)
@pytest.mark.parametrize("name", FTYPES)
def test_a_bug_in_the_product_is_red_live(name: str, bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mode, stage, where, name_there, wrong = PLANTED[bug]
    monkeypatch.setattr(where, name_there, wrong)
    require_red(live(name, tmp_path), mode, stage)


@pytest.mark.live
@pytest.mark.parametrize("name", FTYPES)
def test_a_bug_in_generation_alone_is_red_live(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert not [row for row in live(name, tmp_path) if row.verdict == FAIL]
    right = Model._forward
    rolled = lambda this, new, *p, **k: np.roll(right(this, new, *p, **k), len(new) == 1, -1)  # noqa: E731
    monkeypatch.setattr(Model, "_forward", rolled)
    assert {row.stage for row in live(name, tmp_path) if row.verdict == FAIL} == {"generation"}


@pytest.mark.live
@pytest.mark.parametrize("name", FTYPES)
def test_a_bug_of_the_last_row_alone_is_red_live(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = forward.forward
    constant = lambda *p, last_only=False, **k: right(*p, last_only=last_only, **k) ** (not last_only)  # noqa: E731
    monkeypatch.setattr(numpy_runner, "forward", constant)
    assert {row.stage for row in live(name, tmp_path) if row.verdict == FAIL} == {"selected_logits", "argmax"}


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
    for row in rows:
        assert_tells(row.note, f"1 of {golden().blocks[f'{row.model}.values'].size}", "block 1")


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


def test_products_with_swapped_matrices_are_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = Weights.layer
    monkeypatch.setattr(Weights, "layer", lambda weights, index: right(weights, 1 - index))
    assert red(judged("IQ3_S", tmp_path), "isolated") == PRODUCTS | {"attn_norm", "ffn_norm"}
