"""Diagnosis of dumps of mixtures of experts: a planted mistake is named, the order of experts says nothing."""

import numpy as np
import pytest
from faults.wrong_dumps import dumped, everywhere, mistake, passes, wide
from helpers.stored_goldens import golden_of

from llorch.diagnosis.diagnose import causes
from llorch.diagnosis.dump_checker import DumpChecker
from llorch.diagnosis.replay import Replay
from llorch.diagnosis.verdict import RIGHT, WRONG
from llorch.engines.dumps.stage_dump import StageDump
from llorch.stages.table import BY_NAME

GATED, PLAIN = "micro-qwen2-moe", "micro-qwen3-moe"
INJECTED = [
    (PLAIN, "router-input-not-normalised"), (PLAIN, "topk-one-too-far"), (PLAIN, "topk-weights-not-normalised"),
    (PLAIN, "router-softmax-in-bfloat16"), (PLAIN, "experts-fused-rows-alternate"),
    (PLAIN, "experts-by-rank"), (PLAIN, "moe-unweighted"),
    (GATED, "topk-weights-normalised"), (GATED, "experts-gate-and-up-swapped"), (GATED, "moe-shared-ungated"),
    (GATED, "shared-gate-without-sigmoid"),
]  # fmt: skip


@pytest.mark.slow_cases(but=["micro-qwen2-moe-shared-gate-without-sigmoid", "micro-qwen3-moe-topk-one-too-far"])
@pytest.mark.parametrize(("model", "name"), INJECTED)
def test_injected_mistake_is_named_as_the_cause(model: str, name: str) -> None:
    injected = mistake(name, model)
    found, *_ = causes(wide(model), dumped(model, passes(model), everywhere(injected, wide(model))))
    assert found.suspects[0].name == name
    assert found.key == f"l0.{injected.stages[0]}"


@pytest.mark.parametrize("model", [GATED, PLAIN])
def test_the_order_in_which_an_engine_writes_its_experts_down_says_nothing(model: str) -> None:
    golden = golden_of(model)
    trace = dict(golden.engine_outputs["llamacpp"].traces["near"])
    for name in trace:
        axes = BY_NAME[name.rpartition(".")[2]].axes.split()
        if "topk" in axes:
            trace[name] = np.flip(trace[name], axis=axes.index("topk")).copy()
    assert list(causes(wide(model), StageDump.of_arrays([golden.cases["near"]], trace))) == []


def test_an_expert_with_an_unnamed_bug_is_unknown_although_roundings_are_tried_in_pairs() -> None:
    golden = golden_of(PLAIN)
    trace = dict(golden.engine_outputs["transformers"].traces["near"])
    noise = np.random.default_rng(0).standard_normal(trace["l0.expert_out"].shape).astype(np.float32)
    shown = {"l0.expert_act": trace["l0.expert_act"], "l0.topk_ids": trace["l0.topk_ids"], "l0.expert_out": noise}
    (found,) = causes(wide(PLAIN), StageDump.of_arrays([golden.cases["near"]], shown))
    assert (found.kind, found.starts_in) == ("unknown", ("l0.expert_out",))


def tied(model: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A trace in which the k-th and the next expert of token 2 are alike, and the other choice of the two."""
    trace = dict(golden_of(model).engine_outputs["transformers"].traces["near"])
    probs, ids = trace["l0.router_probs"].copy(), trace["l0.topk_ids"].copy()
    order = np.argsort(-probs[2])
    kth, following = order[ids.shape[1] - 1], order[ids.shape[1]]
    probs[2, following] = probs[2, kth]
    ids[2] = [*order[: ids.shape[1] - 1], max(kth, following)]  # llorch takes the lowest id
    return {"l0.ffn_norm": trace["l0.ffn_norm"], "l0.router_probs": probs, "l0.topk_ids": ids}, probs


@pytest.mark.parametrize("gap", [0.0, 1e-3])
def test_either_of_two_experts_at_an_exact_tie_is_right(gap: float) -> None:
    shown, probs = tied(PLAIN)
    chosen = shown["l0.topk_ids"][2][-1]
    other = next(i for i in np.flatnonzero(probs[2] == probs[2, chosen]) if i != chosen)
    probs[2, other] += np.float32(gap)
    dump = StageDump.of_arrays([golden_of(PLAIN).cases["near"]], shown)
    results = {result.key: result for result in DumpChecker(Replay(wide(PLAIN), dump)).results()}
    assert results["l0.topk_ids"].verdict == (WRONG if gap else RIGHT)
