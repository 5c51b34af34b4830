import numpy as np
import pytest

from llorch.builtin import builtin_path
from llorch.files import Weights, open_weights
from llorch.stages import BY_NAME, keys
from llorch.verify.replay import Pass, chained, cut, isolated
from llorch.verify.verifier import run

WHOLE = Pass((5, 260, 17, 33, 2, 91, 144, 78), first_position=20)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return open_weights(builtin_path("micro-qwen3"))


def test_a_pass_after_some_cached_tokens_keeps_their_positions():
    rest = WHOLE.after(3)
    assert rest.ids == WHOLE.ids[3:]
    np.testing.assert_array_equal(rest.positions, WHOLE.positions[3:])


def test_a_stage_alone_on_our_own_trace_gives_that_trace(weights: Weights):
    trace = run(weights, WHOLE)
    for key, stage, layer in keys(weights.config):
        np.testing.assert_array_equal(isolated(stage, layer, trace, weights, WHOLE), trace[key], err_msg=key)


@pytest.mark.parametrize("n_cached", [1, 5, 7])
def test_a_stage_after_cached_tokens_gives_the_rest_of_the_trace(weights: Weights, n_cached: int):
    wide = weights.astype(np.float64)
    trace = run(wide, WHOLE)
    for key, stage, layer in keys(weights.config):
        got = isolated(stage, layer, trace, wide, WHOLE, n_cached=n_cached)
        want = cut(stage, trace[key], n_cached)
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12, strict=True, err_msg=key)


def test_a_chain_continues_the_caches_of_the_chain_before(weights: Weights):
    wide = weights.astype(np.float64)
    first = chained(wide, Pass(WHOLE.ids[:3], WHOLE.first_position))
    second = chained(wide, WHOLE.after(3), past=first)
    whole = chained(wide, WHOLE)
    np.testing.assert_allclose(
        second["logits"], whole["logits"][3:], rtol=0, atol=1e-12 * np.abs(whole["logits"]).max()
    )


def test_a_replaced_stage_changes_itself_and_what_follows_only(weights: Weights):
    stage = BY_NAME["ffn_act"]
    changed = chained(weights, WHOLE, replace={"ffn_act": lambda s: 2 * stage.compute(s)})
    plain = chained(weights, WHOLE)
    same = [key for key in plain if np.array_equal(plain[key], changed[key])]
    assert same == list(plain)[: list(plain).index("l0.ffn_act")]
