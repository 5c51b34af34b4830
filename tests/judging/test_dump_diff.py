"""Two dumps beside each other: passes, tokens of which one has fewer, and half precision."""

from collections.abc import Mapping

import numpy as np
import pytest
from helpers.refusals import refuses

from llorch.engines.dumps.raw import RawArray, RawDump
from llorch.engines.dumps.stage_dump import DumpedArray, StageDump
from llorch.files import open_weights
from llorch.judging.dump_diff import Side, diff
from llorch.judging.runners.numpy import run
from llorch.runtime.builtin import builtin_path
from llorch.runtime.errors import GuardFailed
from llorch.stages.stage_ref import Pass, Tokens

IDS = Tokens((3, 1, 4, 15, 9))


@pytest.fixture(scope="module")
def trace() -> Mapping[str, np.ndarray]:
    return run(open_weights(builtin_path("micro-qwen3")), Pass(IDS.ids))


def side(*traces: Mapping[str, np.ndarray], tokens: Tokens = IDS) -> Side:
    return Side.of_stages(StageDump.of_arrays([tokens] * len(traces), *traces, source="x"))


def spoilt(trace: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {**trace, name: trace[name] * np.float32(1.1)}


def test_the_first_divergence_is_named_in_its_pass(trace: Mapping[str, np.ndarray]):
    backwards = dict(reversed(list(trace.items())))
    found = dict(diff(side(trace, spoilt(backwards, "l1.k_rope")), side(trace, trace)))
    assert [report.first_divergence for report in found.values()] == [None, "l1.k_rope"]
    assert len(found[1].differences) == len(trace)


def test_of_two_dumps_the_tokens_that_both_have_are_compared(trace: Mapping[str, np.ndarray]):
    last = (len(IDS.ids) - 1,)
    names = ("embed", "l0.q_rope", "l0.attn_scores", "logits")
    rows = {name: trace[name][:, -1:] if name == "l0.attn_scores" else trace[name][-1:] for name in names}
    dumped = {(0, name): DumpedArray(name, "float32", lambda stage_key=name: rows[stage_key], last) for name in names}
    few = Side.of_stages(StageDump("x", (IDS,), dumped))
    for found in (diff(few, side(trace)), diff(side(trace), few)):
        ((_, report),) = found
        assert report.first_divergence is None
        assert report.differences.keys() == set(names)


def test_what_was_stored_in_half_precision_is_held_to_its_steps(trace: Mapping[str, np.ndarray]):
    halves = {name: array.astype(np.float16) for name, array in trace.items()}
    assert [report.first_divergence for _, report in diff(side(halves), side(trace))] == [None]
    ((_, report),) = diff(side(spoilt(halves, "l0.q_proj")), side(trace))
    assert report.first_divergence == "l0.q_proj"


@pytest.mark.parametrize(
    ("other_tokens", "guard"), [(Tokens(IDS.ids, 7), "positions"), (Tokens((3, 1, 4, 15, 8)), "ids")]
)
def test_other_tokens_are_refused(other_tokens: Tokens, guard: str, trace: Mapping[str, np.ndarray]):
    wanted = f"{','.join(map(str, other_tokens.ids))} from {other_tokens.first_position}"
    with refuses(GuardFailed, "pass 0", expected=wanted, got="3,1,4,15,9 from 0", where="x") as refused:
        list(diff(side(trace), side(trace, tokens=other_tokens)))
    assert refused.value.guard == guard


def test_without_a_model_arrays_of_one_name_and_layer_are_compared_as_they_are():
    def raw(value: float, **layers: int) -> Side:
        arrays = tuple(
            (0, RawArray(name, "float32", (2,), lambda: np.full(2, value), layer=layer))
            for name, layer in layers.items()
        )
        return Side.of_names(RawDump("x", arrays))

    ((_, report),) = diff(raw(1.0, mine=0, other=3), raw(1.0, mine=0, other=4))
    assert (report.differences.keys(), report.only) == ({"l0.mine"}, {"actual": ["l3.other"], "expected": ["l4.other"]})
    with refuses(ValueError, got="1 and 1"):
        list(diff(raw(1.0, mine=0), raw(1.0, mine=1)))


def test_diff_of_two_passes_without_tokens_is_refused(trace: Mapping[str, np.ndarray]):
    step = {name: array[-1:] for name, array in trace.items() if array.shape[0] == len(IDS.ids)}
    sides = [Side.of_names(_unsaid(arrays, source)) for arrays, source in ((step, "step"), (trace, "whole"))]
    with refuses(GuardFailed, "ids", "embed", "whole", got=((1, 64), f"all {len(step)} arrays"), where="step"):
        list(diff(*sides))


def _unsaid(arrays: Mapping[str, np.ndarray], source: str) -> RawDump:
    each = [RawArray(name, "float32", array.shape, lambda a=array: a) for name, array in arrays.items()]
    return RawDump(source, tuple((0, array) for array in each))
