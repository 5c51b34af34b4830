"""Derived limits: what a sum may be off, how errors go through stages, and that they follow from goldens alone."""

import math
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.stored_goldens import golden_of, weights_of

from llorch.engines import open_engine
from llorch.files.matrix import Matrix
from llorch.files.packed import Packed
from llorch.files.quant import GGMLType
from llorch.judging.expectations.quantised_models import matrix_bytes
from llorch.judging.tolerances.forward import (
    MATHEMATICS,
    ForwardTolerances,
    derive_tolerance,
    product_error,
    round_variance,
    squared_terms,
    variances,
)
from llorch.judging.tolerances.rounding import ARITHMETICS, CHAINED, DRIFT, FLOAT32, FREE, SUM
from llorch.judging.verify import stored
from llorch.stages.comparison import EXACT, FLOOR, measure
from llorch.stages.stage_ref import token_axis
from llorch.stages.table import BY_NAME, keys

COPIES = ["embed", "l0.k_cache", "l1.v_cache"]
SUMS = ["l0.attn_residual", "l1.block_out"]
WEIGHTS, GOLDEN = weights_of("micro-llama"), golden_of("micro-llama")
GAIN = WEIGHTS.layer(0)["ffn_norm"]
NEAR, TRACE = GOLDEN.cases["near"], GOLDEN.engine_outputs["llamacpp"].traces["near"]


def operands(width: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(0, 1, (4, width)).astype(np.float32), rng.normal(0, 1, (64, width)).astype(np.float32)


def product_tolerance(x: np.ndarray, w: np.ndarray) -> float:
    return product_error(x, w, x @ w.T, FLOAT32)


def matrix(kind: GGMLType, heads: int = 0) -> Matrix:
    shape = (96, 512)
    packed = Packed("w", Path("m.gguf"), matrix_bytes(kind, shape, key="sums"), kind, shape)
    return Matrix(packed, round_inputs=True, interleaved_heads=heads)


def test_the_limit_of_a_product_grows_with_the_root_of_its_width():
    narrow, wide = (product_tolerance(*operands(width)) for width in (4096, 16384))
    assert wide == pytest.approx(2 * narrow, rel=0.1)
    assert narrow == pytest.approx(4 * 2**0.5 * 2**-24 * (4096 / 48 + 4096 / 72) ** 0.5, rel=0.1)


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
@pytest.mark.parametrize("width", [96, 192, 576, 1536])
def test_numpy_product_error_is_below_two_thirds_of_the_tolerance(width: int, rows: int):
    x, w = np.random.default_rng(0).standard_normal((2, 256, width)).astype(np.float32)
    x = x[:rows]
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    terms = np.square(x, dtype=np.float64) @ np.square(w, dtype=np.float64).T
    off = np.sqrt(np.mean(np.square(x @ w.T - exact) / terms))
    assert off <= 2.5 * 2**-24 * math.sqrt(width / 8 / 6)


def test_terms_that_cancel_are_counted():
    x, w = operands(512)
    cancelling = np.concatenate([x, -x], axis=1), np.concatenate([w, w * np.float32(1.001)], axis=1)
    assert product_tolerance(*cancelling) > 100 * product_tolerance(x, w)


def test_tolerance_of_terms_of_one_sign_covers_the_error():
    x, w = (np.abs(array) for array in operands(4096))
    y, true = x @ w.T, x.astype(np.float64) @ w.T.astype(np.float64)
    assert np.linalg.norm(y - true) / np.linalg.norm(true) < product_tolerance(x, w)
    assert product_tolerance(x, w) == pytest.approx(4 * 2**0.5 * 2**-24 * (4096 / 72) ** 0.5, rel=0.1)


@pytest.mark.parametrize("kind", [GGMLType.Q4_1, GGMLType.Q5_1, GGMLType.Q2_K, GGMLType.Q4_K, GGMLType.Q5_K])
@pytest.mark.parametrize("heads", [0, 3])
def test_minima_that_cancel_the_codes_are_counted_as_ggml_sums_them(kind: GGMLType, heads: int):
    """Inputs with a mean in every block: codes and minima give two large sums of opposite sign."""
    made = matrix(kind, heads)

    def spread(x: np.ndarray, weight: Matrix | np.ndarray) -> float:
        """By what factor terms are larger than what remains of them."""
        return float(np.sqrt(squared_terms(x, weight).sum()) / np.linalg.norm(x @ made.dequantize().T))

    x = np.random.default_rng(1).normal(1, 0.1, (4, 512)).astype(np.float32)
    assert spread(x, made) > 1.05 > spread(x, made.dequantize())
    assert spread(np.random.default_rng(2).normal(0, 1, (4, 512)).astype(np.float32), made) < 4


def test_a_type_without_minima_is_counted_by_its_elements():
    x, made = operands(512)[0], matrix(GGMLType.Q6_K)
    np.testing.assert_array_equal(squared_terms(x, made), squared_terms(x, made.dequantize()))


def sums_in_one_lane(n_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of one matrix, added in order in float32; their values; the variances of a product's tolerance."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(0, 1, (5000, 48)).astype(np.float32), rng.normal(0, 1, (n_rows, 48)).astype(np.float32)
    terms = x[:, None] * w
    true = terms.sum(axis=-1, dtype=np.float64)
    spread = 48 * (SUM * np.square(terms).sum(axis=-1) + DRIFT * np.square(true)) + 2 * FLOAT32.rounding(true)
    return np.cumsum(terms, axis=-1)[..., -1], true, spread


@pytest.mark.parametrize(("n_rows", "least"), [(1, 0.25), (2, 0.2), (6, 0.15), (48, 0.25)])
def test_tolerance_of_short_rows_covers_the_error_of_one_element(n_rows: int, least: float):
    actual, expected, spread = sums_in_one_lane(n_rows)
    tolerance = derive_tolerance(expected, spread, BY_NAME["b_in"])
    off = measure(actual.astype(np.float64), expected, token_axis=0)
    assert off.within(tolerance)
    assert off.tokens is not None
    assert float((off.tokens / tolerance.tokens).max()) > least


def test_tolerance_of_long_rows_is_four_standard_deviations():
    tolerance = derive_tolerance(np.ones((3, 16)), np.full((3, 16), 1e-6), BY_NAME["b_in"])
    np.testing.assert_allclose([tolerance.error, *np.asarray(tolerance.tokens)], 4e-3)


@cache
def tolerances(dtype: str = "float32") -> ForwardTolerances:
    return ForwardTolerances(WEIGHTS, NEAR, TRACE, ARITHMETICS[dtype])


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_exact_on_the_same_float32_input(name: str):
    assert tolerances().isolated(name) == EXACT != tolerances("bfloat16").isolated(name)
    assert (tolerances().chained(name) == EXACT) == (name == "embed")


@pytest.mark.parametrize("name", SUMS)
def test_tolerance_of_sums_of_two_is_the_minimum(name: str):
    assert tolerances().isolated(name).error == FLOOR


@pytest.mark.parametrize(
    ("name", "input_name", "weight"),
    [("l1.q_proj", "l1.attn_norm", "layers.1.q_proj"), ("l1.ffn_out", "l1.ffn_act", "layers.1.down_proj")],
)
def test_isolated_product_tolerance_covers_only_its_sum(name: str, input_name: str, weight: str):
    own = product_error(TRACE[input_name], WEIGHTS[weight], TRACE[name], FLOAT32)
    assert tolerances().isolated(name).error == pytest.approx(own, rel=1e-3)
    assert tolerances().chained(name).error > 2 * own


def product(gate_input: np.ndarray) -> np.ndarray:
    return gate_input @ np.float64(WEIGHTS.layer(0)["gate_proj"]).T


def norm(x: np.ndarray) -> np.ndarray:
    mean_square = np.square(x).mean(-1, keepdims=True) + WEIGHTS.config.rms_norm_eps
    return x / np.sqrt(mean_square) * WEIGHTS.layer(0)["ffn_norm"]


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize(
    ("op", "inputs", "output", "least"),
    [
        (product, ["l0.ffn_norm"], "l0.ffn_gate", 0.6),  # and the tolerance covers the scale of whole rows
        (norm, ["l0.attn_residual"], "l0.ffn_norm", 0.9),
        (swiglu, ["l0.ffn_gate", "l0.ffn_up"], "l0.ffn_act", 0.9),
    ],
    ids=["product", "norm", "swiglu"],
)
def test_an_error_goes_through_a_stage_as_it_was_derived(op, inputs: list[str], output: str, least: float):
    """Noise of the derived size on what enters a stage gives noise of the derived size behind it."""
    spread = {name: array[CHAINED] for name, array in variances(WEIGHTS, NEAR, TRACE)}
    rng, exact = np.random.default_rng(0), [np.float64(TRACE[name]) for name in inputs]
    made = []
    for _ in range(50):
        noise = [rng.standard_normal(x.shape) * np.sqrt(spread[name]) for name, x in zip(inputs, exact, strict=True)]
        made.append(op(*(x + e for x, e in zip(exact, noise, strict=True))) - op(*exact))
    assert least <= np.sqrt(np.square(made).sum() / 50 / spread[output].sum()) <= 1.1


FED_FORWARD = ("ffn_norm", "ffn_gate", "ffn_up", "ffn_act", "ffn_out")


def feed_forward(x: np.ndarray, gain: np.ndarray) -> dict[str, np.ndarray]:
    normed, layer = norm(x) / WEIGHTS.layer(0)["ffn_norm"] * gain, WEIGHTS.layer(0)
    gate, up = (normed @ np.float64(layer[name]).T for name in ("gate_proj", "up_proj"))
    act = swiglu(gate, up)
    out = act @ np.float64(layer["down_proj"]).T
    return {f"l0.{name}": array for name, array in zip(FED_FORWARD, (normed, gate, up, act, out), strict=True)}


@pytest.mark.parametrize("output", FED_FORWARD)
def test_the_error_of_a_channel_much_larger_than_others_goes_with_the_whole_token(
    output: str, monkeypatch: pytest.MonkeyPatch
):
    """The divisor of the norm is off by it. Published models have such channels, with small gains."""
    x, gain = (array.astype(np.float64) for array in (TRACE["l0.attn_residual"], GAIN))
    attn_out = TRACE["l0.attn_out"].copy()
    x[:, 5] = 100 * np.abs(x).max()
    attn_out[:, 5] = 1e4 * x[:, 5]  # its error, as if the other term of the residual took most of it away
    gain[5] = 1e-4
    first, weights = {**WEIGHTS.layer(0), "ffn_norm": gain}, copy(WEIGHTS)
    monkeypatch.setattr(weights, "layer", lambda layer: WEIGHTS.layer(layer) if layer else first)
    golden = {**TRACE, "l0.attn_out": attn_out, "l0.attn_residual": x, **feed_forward(x, gain)}
    spread = {name: array[CHAINED] for name, array in variances(weights, NEAR, golden)}
    rng, errors = np.random.default_rng(0), []
    for _ in range(200):
        noise = rng.standard_normal(x.shape) * np.sqrt(spread["l0.attn_residual"])
        errors.append(feed_forward(x + noise, gain)[f"l0.{output}"] - golden[f"l0.{output}"])
    tokens = np.sqrt(np.square(errors).sum(axis=(0, 2)) / 200 / spread[f"l0.{output}"].sum(axis=-1))
    assert 0.3 <= tokens.min()
    assert tokens.max() <= 1.2


def test_in_float64_it_is_1e_12_but_of_one_token_whose_terms_cancel():
    last = len(NEAR.ids) - 1
    assert {tolerances().in_float64(name, start) for name in TRACE for start in (0, 5, last)} == {MATHEMATICS}
    for share, least, most in ((3e-3, 1e-12, 1e-11), (1e-6, 1e-11, 1e-11)):
        near_nothing = TRACE["l1.ffn_gate"].copy()
        near_nothing[-1] *= share  # as if the products of the last token cancelled each other
        made = ForwardTolerances(WEIGHTS, NEAR, {**TRACE, "l1.ffn_gate": near_nothing})
        assert made.in_float64("l1.ffn_gate", last - 1) == MATHEMATICS
        alone = made.in_float64("l1.ffn_gate", last)
        assert (alone.worst, alone.tokens) == (MATHEMATICS.worst, MATHEMATICS.tokens)
        assert least <= alone.error <= most


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_error_that_all_tokens_share_goes_through_attention_whole_in_half_precision(dtype: Any):
    """A weight that is rounded is off by the same for all of them, and a mean over 19 tokens does not shrink that."""
    weights, golden = stored("micro-mistral")
    trace = golden.engine_outputs["transformers"].traces["near"]
    made = variances(weights, golden.cases["near"], trace, lambda key: ARITHMETICS[dtype])
    spread = {name: array[CHAINED] for name, array in made}
    off = np.sqrt(spread["l1.v_cache"]).repeat(weights.config.group_size, axis=0)
    shared = np.float64(trace["l1.attn_probs"]) @ off
    assert 0.5 <= np.sqrt(np.square(shared).sum() / spread["l1.attn_context"].sum()) <= 1


def test_limits_are_made_of_the_golden_and_not_of_what_ours_computes(monkeypatch: pytest.MonkeyPatch):
    for place in ("llorch.model.blocks.forward", "llorch.judging.runners.numpy.forward"):
        monkeypatch.setattr(place, None)
    again = ForwardTolerances(WEIGHTS, NEAR, TRACE)
    assert all(again.isolated(name) == tolerances().isolated(name) for name in TRACE)
    assert all(again.chained(name) == tolerances().chained(name) for name in TRACE)


@pytest.mark.parametrize("name", ["l0.attn_norm", "l0.ffn_act", "l1.attn_context", "logits"])
def test_a_golden_that_is_wrong_does_not_widen_its_limit(name: str):
    wrong = ForwardTolerances(WEIGHTS, NEAR, {**TRACE, name: 1.1 * TRACE[name]})
    for mode in ("isolated", "chained"):
        before, after = (getattr(made, mode)(name) for made in (tolerances(), wrong))
        assert after.error <= 1.01 * before.error
        assert after.worst <= 1.01 * before.worst
        assert (after.tokens <= 1.01 * before.tokens).all()


@pytest.mark.live
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("engine", ["llamacpp", "transformers"])
def test_engines_of_others_in_half_precision_stay_within_what_is_derived(engine: Any, dtype: Any):
    """They round in other places than we do, and oftener; what is derived must hold for every right run."""
    with open_engine(engine, WEIGHTS.path, dtype=dtype) as engine_name:
        for case, this in GOLDEN.cases.items():
            true = GOLDEN.reference.engine_output.traces[case]
            made = ForwardTolerances(WEIGHTS, this, true, ARITHMETICS[dtype])
            shown = engine_name.trace(this.ids, first_position=this.first_position)
            for name, stage, _ in keys(WEIGHTS.config):
                theirs, axis = shown[name].astype(np.float64), token_axis(stage)
                apart = measure(theirs, true[name], masked=stage.masked, token_axis=axis)
                assert apart.within(made.chained(name)), f"{case} {name}: {apart.describe()}"


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q8_K"])
def test_behind_a_rounding_an_error_of_many_steps_is_still_there(kind: Any):
    """Codes follow a value that is off by more than a step; one that is off by far less flips now and then."""
    x = np.random.default_rng(0).normal(0, 1, (4, 512)).astype(np.float32)
    for off, least, most in ((1.0, 1.0, 1.1), (1e-12, 1.0, math.inf)):
        given = np.zeros((3, *x.shape), np.float32)
        given[FREE] = off**2
        made = round_variance(given, x, kind)
        assert not made[:FREE].any()
        assert least <= np.sqrt(made[FREE].mean()) / off <= most
