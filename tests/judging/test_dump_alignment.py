"""Two paths of one engine: cached and not, chunked and whole are compared by position."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from fakes.fresh_engine import FreshEngine
from helpers.refusals import refuses

from llorch.engines.dumps.stage_dump import DumpedArray, StageDump
from llorch.files import open_weights
from llorch.judging.dump_alignment import Parting, align, pair_rows
from llorch.judging.dump_diff import Side, diff
from llorch.model.blocks import forward
from llorch.model.cache import KVCache
from llorch.runtime.builtin import builtin_path
from llorch.runtime.errors import GuardFailed, UserError
from llorch.stages.comparison import Report
from llorch.stages.stage_ref import Tokens

IDS = (3, 1, 4, 15, 9, 2, 6, 5, 33, 17, 21, 40)
Trace = Mapping[str, np.ndarray]
MODELS = {"micro-llama": IDS, "micro-qwen3.5": tuple(range(3, 15)), "micro-mistral": tuple(range(3, 35))}


def run(sizes: tuple[int, ...], model: str = "micro-llama") -> tuple[list[Tokens], list[dict[str, np.ndarray]]]:
    """Run passes of these sizes, and trace each."""
    weights, ids = open_weights(builtin_path(model)), MODELS[model]
    cache, passes, traces = KVCache(weights.config, np.float32), [], []
    for size in sizes:
        start = sum(len(tokens.ids) for tokens in passes)
        passes.append(Tokens(ids[start : start + size], start))
        traces.append({})

        def keep(name: str, array: np.ndarray, trace: dict[str, np.ndarray] = traces[-1]) -> np.ndarray:
            trace[name] = array.copy()
            return array

        forward(np.array(passes[-1].ids), weights, cache, keep=keep)
    return passes, traces


def side(
    sizes: tuple[int, ...], model: str = "micro-llama", change: Callable = lambda number, name, array: array
) -> Side:
    passes, traces = run(sizes, model)
    changed = [{name: change(n, name, array) for name, array in trace.items()} for n, trace in enumerate(traces)]
    return Side.of_stages(StageDump.of_arrays(passes, *changed, source="x"))


def aligned(a: Side, b: Side) -> tuple[Report, Parting | None]:
    result = align(a, b)
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("micro-llama", (8, 1, 3)),
        ("micro-llama", (1,) * 12),
        ("micro-qwen3.5", (6, 5, 1)),
        ("micro-mistral", (20, 11, 1)),
    ],
)
def test_a_text_in_chunks_and_whole_agree_in_all_stages(model: str, sizes: tuple[int, ...]):
    whole, chunks = side((len(MODELS[model]),), model), side(sizes, model)
    for pair in ((whole, chunks), (chunks, whole)):
        report, parting = aligned(*pair)
        assert parting is None
        assert report.first_divergence is None
        assert report.differences.keys() == {name for _, name in whole.arrays}


@pytest.mark.parametrize(
    ("stage", "number", "position"),
    [("l1.k_rope", 1, 8), ("l0.attn_scores", 2, 9), ("l2.v_cache", 2, 0), ("logits", 0, 0)],
)
def test_first_position_that_differs_is_named_with_both_passes(stage: str, number: int, position: int):
    spoilt = side((8, 1, 3), change=lambda n, name, x: x * np.float32(1.001) if (n, name) == (number, stage) else x)
    report, parting = aligned(spoilt, side((12,)))
    assert (report.first_divergence, parting) == (stage, Parting(stage, position, number, 0))


def test_mask_that_differs_in_a_chunk_is_found_at_its_position():
    def unmask(number: int, name: str, array: np.ndarray) -> np.ndarray:
        is_chunk = (number, name) == (1, "l0.attn_scores")
        return np.where(np.isneginf(array), np.float32(0), array) if is_chunk else array

    _, parting = aligned(side((8, 4), change=unmask), side((12,)))
    assert parting == Parting("l0.attn_scores", 8, 1, 0)


def test_rows_of_one_dump_only_are_not_compared():
    passes, (trace,) = run((12,))
    logits = DumpedArray("logits", "float32", lambda: trace["logits"][-1:], (11,))
    few = Side.of_stages(StageDump("x", tuple(passes), {(0, "logits"): logits}))
    report, parting = aligned(side((8, 3, 1)), few)
    assert (report.differences.keys(), parting) == ({"logits"}, None)
    with refuses(UserError, "stage", got="none", where="x"):
        aligned(side((8, 3)), few)


@pytest.mark.parametrize("other", [Tokens((3, 1, 4, 8), 0), Tokens(IDS[:4], 2), Tokens(IDS[8:], 8)])
def test_another_text_is_refused(other: Tokens):
    """The last has the right ids, but starts its text at position 8: its cache was empty."""
    trace = run((4,))[1][0]
    late = Side.of_stages(StageDump.of_arrays([other], trace, source="late"))
    assert align(late, side((8, 4))) is None
    with refuses(GuardFailed, "pass 0", where="late"):
        list(diff(late, side((8, 4))))


def test_rows_of_a_batch_are_paired_by_their_ids():
    whole, chunks, other = side((12,)), side((8, 4)), Side("other", (Tokens((9, 9)),), {}, has_stages=True)
    assert pair_rows([other, chunks], [whole]) == [(chunks, whole)]
    assert pair_rows([whole, other], [other, whole]) == [(whole, whole), (other, other)]
    with refuses(GuardFailed, "ids", expected="3 1 4", got="9 9", where="other") as refused:
        pair_rows([other, other], [whole])
    assert refused.value.guard == "ids"


def test_recurrent_state_is_compared_after_a_token_that_ends_a_pass_of_both():
    pair = side((6, 6), "micro-qwen3.5"), side((6, 5), "micro-qwen3.5")
    for report, parting in (aligned(*pair), aligned(*reversed(pair))):
        assert parting is None
        assert "l0.delta_state" in report.differences


def test_a_step_behind_a_dumped_cache_is_compared_with_its_rows_in_the_whole():
    engine = FreshEngine(open_weights(builtin_path("micro-llama")))
    engine.run(IDS[:11])
    dump = StageDump.of_arrays([Tokens(IDS[11:], 11)], engine.run(IDS[11:]), source="step")
    step = Side("step", dump.passes, dump.dumped, has_stages=True, n_before=11)
    report, parting = aligned(step, side((12,)))
    assert parting is None
    assert {"l0.k_cache", "l0.attn_probs", "logits"} <= report.differences.keys()
