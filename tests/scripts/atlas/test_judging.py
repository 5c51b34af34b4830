"""The judge of one dump. Here a run of llorch is the reference: the tests are about rules, not numbers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders.comparisons import atlas_comparison
from builders.quantised_folders import FOLDERS
from helpers.refusals import assert_tells, refuses

from benchmarks.atlas.inputs import AtlasInput
from benchmarks.atlas.judging import EngineRunReport, Trace, judge
from benchmarks.atlas.verdicts import EngineReport, with_verdict
from llorch.engines.dumps.writers.dump_writer import DumpWriter
from llorch.files import Weights, open_weights
from llorch.model.model import Model
from llorch.ops.numerics import SCHEME, Numerics
from llorch.runtime.builtin import builtin_path

MODEL = builtin_path("micro-qwen3-moe")
IDS = [5, 9, 33, 120, 7, 64, 9, 200]
FEW = [5, 9, 23, 12, 7, 6, 9, 20]  # of the quantised folders


def traced(weights: Weights, ids: list[int]) -> dict[str, np.ndarray]:
    trace: dict[str, np.ndarray] = {}
    Model(weights).forward(ids, trace=trace)
    return trace


@pytest.fixture(scope="module")
def reference() -> Trace:
    return traced(open_weights(MODEL).astype(np.float64), IDS)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return traced(open_weights(MODEL), IDS)


def write(folder: Path, trace: Trace, ids: list[int]) -> None:
    with DumpWriter(folder, dtype="float32") as dump:
        dump.begin(ids)
        for key, array in trace.items():
            layer, _, name = key.rpartition(".")
            dump.add(name, array, layer=int(layer[1:]) if layer else None)


def engine_report(run: EngineRunReport) -> EngineReport:
    return with_verdict(EngineReport("engine", "", AtlasInput("any")), run)


def run_report(folder: Path, trace: Trace, reference: Trace) -> EngineRunReport:
    write(folder, trace, IDS)
    return judge(MODEL, folder, reference)


def test_a_right_run_is_right_in_every_stage(trace: Trace, reference: Trace, tmp_path: Path):
    found = run_report(tmp_path, trace, reference)
    assert found.is_right
    assert (engine_report(found).label, engine_report(found).message) == ("PASS", "")
    assert {comparison.verdict for comparison in found.comparisons} == {"PASS"}
    assert found.errors.keys() == {key.rpartition(".")[2] for key in reference}
    assert 0 < found.error < 1e-5


def test_logits_that_are_off_are_wrong_and_the_stage_is_named(trace: Trace, reference: Trace, tmp_path: Path):
    last = [key for key in trace if key.endswith(".block_out")][-1]
    found = run_report(tmp_path, {last: trace[last], "logits": 1.01 * trace["logits"]}, reference)
    assert engine_report(found).label == "FAIL"
    assert found.key == "logits"


def test_a_stage_of_which_nothing_came_is_the_adapters(trace: Trace, reference: Trace, tmp_path: Path):
    found = run_report(tmp_path, {**trace, "l1.q_rope": 2 * trace["l1.q_rope"]}, reference)
    assert engine_report(found).label == "unreadable"
    assert_tells(engine_report(found).message, "q_rope")


def exchange_expert(trace: Trace, reference: Trace) -> tuple[np.ndarray, int, int]:
    """Ids with another expert for the first token, that one, and which it replaces."""
    ids = trace["l0.topk_ids"].copy()
    other = next(each for each in range(reference["l0.router_probs"].shape[1]) if each not in ids[0])
    replaced = int(ids[0, -1])
    ids[0, -1] = other
    return ids, other, replaced


def test_another_expert_is_wrong(trace: Trace, reference: Trace, tmp_path: Path):
    ids, *_ = exchange_expert(trace, reference)
    shown = {**trace, "l0.topk_ids": ids, "logits": 1.01 * trace["logits"]}
    assert not run_report(tmp_path, shown, reference).is_right


def test_another_expert_at_a_tie_is_rounding_and_ends_the_judgement(trace: Trace, reference: Trace, tmp_path: Path):
    ids, other, replaced = exchange_expert(trace, reference)
    scores = reference["l0.router_probs"].copy()
    scores[0, other] = scores[0, replaced]
    shown = {"l0.topk_ids": ids, "logits": 1.01 * trace["logits"]}
    found = run_report(tmp_path, shown, {**reference, "l0.router_probs": scores})
    assert f"expected [{replaced}], got [{other}]" in found.tie
    assert engine_report(found).label == "ROUNDING"
    before = {**trace, "l0.q_proj": 1.01 * trace["l0.q_proj"], **shown}
    assert not run_report(tmp_path, before, {**reference, "l0.router_probs": scores}).is_right


def test_a_dump_without_logits_says_so(trace: Trace, reference: Trace, tmp_path: Path):
    with refuses(ValueError, tmp_path, expected="logits", got=1):
        run_report(tmp_path, {"embed": trace["embed"]}, reference)


def run_of(name: str, numerics: Numerics, change: float = 1.0) -> dict[str, np.ndarray]:
    """Every stage of a quantised folder in float32."""
    trace = traced(open_weights(FOLDERS / name).using(numerics=numerics), FEW)
    return {key: array * np.float32(change if key == "l0.ffn_gate" else 1) for key, array in trace.items()}


def compare_folder(name: str, trace: Trace, folder: Path) -> EngineRunReport:
    write(folder, trace, FEW)
    return judge(FOLDERS / name, folder, traced(open_weights(FOLDERS / name).astype(np.float64), FEW))


@pytest.mark.parametrize("name", ["ct-w8a8", "ct-fp8-static-kv"])
def test_engine_that_rounds_activations_as_the_folder_says_is_right(name: str, tmp_path: Path):
    found = compare_folder(name, run_of(name, SCHEME), tmp_path)
    assert not found.is_right
    assert {comparison.verdict for comparison in found.comparisons} == {"PASS", "ROUNDING"}
    assert engine_report(found).label == "ROUNDING"
    assert_tells(engine_report(found).message, "scheme")


def test_engine_that_rounds_activations_and_errs_is_wrong(tmp_path: Path):
    found = compare_folder("ct-w8a8", run_of("ct-w8a8", SCHEME, 1.1), tmp_path)
    assert engine_report(found).label == "FAIL"


def test_mistake_of_reading_is_wrong_although_the_logits_are_within_their_tolerance():
    comparisons = [atlas_comparison("ffn_gate", 1e-2, 1e-3), atlas_comparison("logits", 1e-3, 2e-3)]
    found = EngineRunReport(comparisons, "bfloat16", wrong=True, findings=("said",), key="l0.ffn_gate")
    assert engine_report(found).label == "unreadable"
    assert engine_report(replace(found, mistake="fp8-blocks-of-equal-size")).label == "FAIL"
