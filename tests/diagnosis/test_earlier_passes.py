"""Dumps of a part of a run: a right engine is not accused, a wrong one is, and what nobody can judge is NOT RUN."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from fakes.fresh_engine import FreshEngine, raw_dump_of
from faults.wrong_dumps import BLOCKS, dump_run, everywhere, float64_weights, mistake, passes

from llorch.diagnosis.diagnose import diagnose
from llorch.diagnosis.dump_checker import DumpChecker
from llorch.diagnosis.earlier_passes import first_past
from llorch.diagnosis.replay import Change, Replay
from llorch.diagnosis.verdict import EARLIER_PASSES, Diagnosis
from llorch.engines.dumps.raw import RawDump, with_earlier_pass
from llorch.engines.dumps.stage_dump import StageDump
from llorch.engines.dumps.stage_mapping import stage_dump
from llorch.judging.verify import stored
from llorch.stages.comparison import FAIL
from llorch.stages.stage_ref import Tokens

LLAMA, MISTRAL = "micro-llama", "micro-mistral"  # Mistral sees 19 tokens
IDS = tuple(range(3, 35))
ENDS: dict[str, tuple[str, tuple[int, ...], int]] = {  # the model; where passes end, of which the first are not dumped
    "one step": (LLAMA, (7, 8), 1),
    "second chunk": (LLAMA, (7, 12), 1),
    "two steps": (LLAMA, (7, 8, 9), 1),
    "cache of a window": (MISTRAL, (24, 25, 26), 0),
    "chunk behind a window": (MISTRAL, (24, 30), 0),
    "step behind a window": (MISTRAL, (24, 25), 1),
}


def run(name: str, change: Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]] = dict) -> RawDump:
    model, ends, n_hidden = ENDS[name]
    engine, start, shown = FreshEngine(stored(model)[0]), 0, []
    for end in ends:
        shown.append((Tokens(IDS[start:end], start), change(engine.run(IDS[start:end]))))
        start = end
    return raw_dump_of(shown[n_hidden:])


def diagnosed(name: str, raw: RawDump) -> Diagnosis:
    weights = stored(ENDS[name][0])[0]
    dump = stage_dump(raw, weights.config, weights=weights)
    return diagnose(float64_weights(ENDS[name][0]), dump)


@pytest.mark.slow_cases(but=["second chunk-batch of one", "step behind a window-"])
@pytest.mark.parametrize(
    "change", [dict, lambda trace: {name: array[None] for name, array in trace.items()}], ids=["", "batch of one"]
)
@pytest.mark.parametrize("name", ENDS)
def test_a_right_engine_is_not_accused(name: str, change: Callable):
    raw = run(name, change)
    found = diagnosed(name, raw)
    assert (found.findings, found.not_run) == ([], {})
    assert len(found.results) == len(raw.arrays)


@pytest.mark.parametrize("name", ["one step", "second chunk", "step behind a window"])
def test_dump_with_earlier_tokens_is_diagnosed_from_the_first_token(name: str):
    raw = run(name)
    given = with_earlier_pass(raw, IDS[: raw.passes[-1].first_position + len(raw.passes[-1].ids)])
    assert [len(tokens.ids) for tokens in given.passes] == [ENDS[name][1][0], len(raw.passes[0].ids)]
    found = diagnosed(name, given)
    assert (found.findings, found.not_run) == ([], {})
    assert all(result.chained is not None for result in found.results)


def test_ids_that_do_not_end_as_the_dump_does_leave_it_as_it_is():
    raw = run("one step")
    assert with_earlier_pass(raw, (*IDS[:7], 99)) is raw
    assert with_earlier_pass(raw, IDS[1:8]) is raw
    assert with_earlier_pass(raw, None) is raw


@pytest.mark.slow_cases(but=[
    "attn_probs-step behind a window", "ffn_act-step behind a window", "k_cache-second chunk",
    "k_cache-step behind a window",
])  # fmt: skip
@pytest.mark.parametrize("name", ["one step", "second chunk", "chunk behind a window", "step behind a window"])
@pytest.mark.parametrize("stage", ["k_cache", "attn_probs", "attn_context", "ffn_act"])
def test_what_a_part_of_a_run_shows_wrong_is_found(name: str, stage: str):
    def spoilt(trace: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        array = trace[f"l1.{stage}"].copy()
        array[..., -1, :] *= np.float32(1.001)  # of the newest key, or of the last token
        return {**trace, f"l1.{stage}": array}

    weights = stored(ENDS[name][0])[0]
    dump = stage_dump(run(name, spoilt), weights.config, weights=weights)
    results = DumpChecker(Replay(float64_weights(ENDS[name][0]), dump)).results()
    assert next(result.key for result in results if result.verdict == FAIL) == f"l1.{stage}"


def test_a_window_that_forgets_too_much_is_accused():
    engine = FreshEngine(stored(MISTRAL)[0])
    engine.run(IDS[:24])
    engine.past = {layer: (k[:, 1:], v[:, 1:]) for layer, (k, v) in engine.past.items()}
    raw = raw_dump_of([(Tokens(IDS[24:25], 24), engine.run(IDS[24:25]))])
    found = diagnosed("step behind a window", raw)
    assert found.findings[0].key == "l0.attn_scores"


@pytest.mark.parametrize("stage", ["k_cache", "v_cache"])
def test_keys_that_a_window_dropped_are_computed(stage: str):
    raw, weights = run("cache of a window"), stored(MISTRAL)[0]
    dump, stage_key = stage_dump(raw, weights.config, weights=weights), f"l0.{stage}"
    replay, computed = Replay(float64_weights(MISTRAL), dump), dict[str, np.ndarray]()
    past = first_past(replay)
    replay.run(0, lambda name, array: None, past)
    passed = replay.run(1, computed.__setitem__, past.next(), last=0)[stage_key]
    dumped = dump.dumped[1, stage_key].read()
    n_dropped = passed.shape[1] - dumped.shape[1]
    assert n_dropped > 0
    assert np.array_equal(passed[:, :n_dropped], computed[stage_key][:, :n_dropped])
    assert np.array_equal(passed[:, n_dropped:], dumped)


def part(dump: StageDump, n_pass: int, n_before: int | None) -> StageDump:
    dumped = {(0, key): dumped for key, dumped in dump.of_pass(n_pass)}
    return StageDump("part", (dump.passes[n_pass],), dumped, n_before=n_before)


def test_a_state_that_the_dump_does_not_show_is_not_run():
    model = "micro-qwen3.5"
    found = diagnose(float64_weights(model), part(dump_run(model, passes(model, 7, 1)), 1, 7))
    layer = ("conv_state", "conv_out", "delta_state", "delta_out")
    assert found.findings == []
    assert found.not_run == {EARLIER_PASSES: [(0, f"l0.{stage}") for stage in layer]}


def test_a_mistake_behind_a_state_that_is_not_shown_is_named():
    model = "micro-qwen3.5"
    change = everywhere(mistake("gate-sigmoid-missing", model), float64_weights(model))
    (found,) = diagnose(float64_weights(model), part(dump_run(model, passes(model, 7, 1), change), 1, 7)).findings
    assert found.causes[0].name == "gate-sigmoid-missing"


@pytest.mark.parametrize("model", ["micro-qwen3.5", pytest.param(LLAMA, marks=pytest.mark.nightly)])
def test_an_error_of_a_later_step_without_any_cache_is_not_run(model: str):
    shown = ("embed", "l0.attn_norm", "l0.attn_residual", "final_norm", "logits")
    dump = dump_run(model, passes(model, 7, 1), is_dumped=lambda key: key in shown)
    found = diagnose(float64_weights(model), part(dump, 1, None))
    assert found.findings == []
    assert found.not_run == {EARLIER_PASSES: [(0, "l0.attn_residual"), (0, "final_norm")]}
    assert [result.key for result in found.results] == ["embed", "l0.attn_norm", "logits"]


@pytest.mark.slow
def test_blocks_of_a_second_chunk_without_any_cache_are_not_run():
    dump = dump_run(LLAMA, passes(LLAMA, 7, 5), is_dumped=BLOCKS)
    found = diagnose(float64_weights(LLAMA), part(dump, 1, None))
    assert found.findings == []
    assert [key for _, key in found.not_run[EARLIER_PASSES]] == ["l0.block_out", "l1.block_out", "l2.block_out"]


@pytest.mark.slow
def test_an_unknown_error_in_a_text_that_starts_late_is_found():
    noise = np.random.default_rng(7).normal(scale=1e-2, size=5000)

    def of_later_tokens(scores: np.ndarray) -> np.ndarray:
        return scores + noise[: scores.size].reshape(scores.shape)

    change = Change(passed_on={"l0.attn_scores": of_later_tokens})
    dump = dump_run(LLAMA, passes(LLAMA, 7, first_position=5000), change, BLOCKS)
    found = diagnose(float64_weights(LLAMA), part(dump, 0, None))
    assert found.not_run == {}
    assert [(finding.kind, finding.key) for finding in found.findings] == [("unknown", "l0.block_out")]
