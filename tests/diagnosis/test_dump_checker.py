"""Profiles of an error within a stage; dumps of experts and delta nets, in which more than numbers may differ.

Profiles have the token, head and channel in which an error was made, whatever the order of axes. The order of experts
says nothing. Hybrids have a prompt, one token, a few more: the memory of a delta net goes from pass to pass.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from faults.wrong_dumps import dump_run, everywhere, float64_weights, mistake, passes
from helpers.stored_goldens import golden_of

from llorch.diagnosis import dump_checker as module
from llorch.diagnosis.diagnose import findings
from llorch.diagnosis.dump_checker import N_ULPS, ArrayPair, DumpChecker, profile
from llorch.diagnosis.replay import Replay
from llorch.diagnosis.verdict import Diagnosis, Finding
from llorch.engines.dumps.stage_dump import StageDump
from llorch.families.config import ModelConfig
from llorch.files import Weights, open_weights
from llorch.model.blocks import forward
from llorch.model.cache import KVCache
from llorch.runtime.builtin import builtin_path
from llorch.stages.comparison import FAIL, PASS
from llorch.stages.stage_ref import Pass
from llorch.stages.table import BY_NAME

N_TOKENS = 5


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return open_weights(builtin_path("micro-qwen3")).config


def right(stage: str, config: ModelConfig) -> np.ndarray:
    shape = BY_NAME[stage].shape(config, seq=N_TOKENS, ctx=N_TOKENS)
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("at_once", [1, 2**22])
@pytest.mark.parametrize(
    ("stage", "index", "place"),
    [
        ("q_rope", (3, 1, 7), (3, 1, 7)), ("k_cache", (1, 3, 7), (3, 1, 7)), ("attn_probs", (1, 3, 2), (3, 1, 2)),
        ("ffn_gate", (3, 9), (3, None, 9)), ("logits", (3, 1), (3, None, 1)),
    ],
)  # fmt: skip
def test_an_error_is_found_where_it_was_made(
    stage: str, index: tuple, place: tuple, at_once: int, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "AT_ONCE", at_once)
    expected = right(stage, config)
    actual = expected.copy()
    actual[index] += 1
    found = profile(actual, expected, BY_NAME[stage], config)
    for shares, at in zip((found.tokens, found.heads, found.channels), place, strict=True):
        assert (None if shares is None else np.flatnonzero(shares).tolist()) == (None if at is None else [at])
    assert found.ulps.sum() == expected.size
    assert found.ulps[0] == expected.size - 1


def test_a_joined_projection_is_told_apart_by_head(config: ModelConfig):
    expected = right("q_proj", config)
    actual = expected.copy()
    actual[:, config.head_dim * 2 + 5] *= 2
    found = profile(actual, expected, BY_NAME["q_proj"], config)
    assert found.heads is not None
    assert (np.flatnonzero(found.heads), np.flatnonzero(found.channels)) == ([2], [5])
    assert found.heads.shape == (config.n_heads,)
    off = np.linalg.norm(actual[0] - expected[0]) / np.linalg.norm(expected[0])
    assert found.tokens[0] == pytest.approx(off)


@pytest.mark.parametrize(
    ("ulps", "bin_index"), [(0, 0), (1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (2**23, 24), (2**24, 25)]
)
def test_ulps_are_counted_in_steps_of_the_element(ulps: int, bin_index: int, config: ModelConfig):
    expected = np.full((1, config.hidden_size), 1.5)
    found = profile(expected + ulps * 2.0**-23, expected, BY_NAME["embed"], config).ulps
    assert np.flatnonzero(found).tolist() == [bin_index]
    assert len(found) == N_ULPS


def test_masks_that_agree_are_no_error_and_others_are_without_end(config: ModelConfig):
    expected = right("attn_scores", config)
    expected[:, ~np.tri(N_TOKENS, dtype=bool)] = -np.inf
    actual = expected.copy()
    actual[1, 0, 4], actual[2, 3, 0] = 0.0, -np.inf
    found = profile(actual, expected, BY_NAME["attn_scores"], config)
    assert found.heads is not None
    assert np.flatnonzero(found.tokens).tolist() == [0, 3]
    assert found.heads[1:3].tolist() == [np.inf, np.inf]
    assert found.heads[0] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_none_are_errors_without_end(bad: float, config: ModelConfig):
    expected = right("embed", config)
    actual = expected.copy()
    actual[2, 3] = bad
    found = profile(actual, expected, BY_NAME["embed"], config)
    assert found.tokens.tolist() == [0, 0, np.inf, 0, 0]
    assert found.ulps[-1] == 1


@pytest.mark.parametrize(("token", "fault"), [(1, False), (2, True)])
def test_entries_are_no_error_only_if_neither_array_is_finite_there(token: int, fault: bool, config: ModelConfig):
    expected = right("embed", config)
    actual = expected.copy()
    expected[1], actual[token] = np.nan, np.inf
    difference = ArrayPair(actual, expected, masked=False, token_axis=0).where_finite().difference
    assert (difference.fault is not None) == fault
    assert (difference.error == 0) != fault


def test_a_vocabulary_is_cut_into_stretches(config: ModelConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_STRETCHES", 100)
    expected = right("logits", config)
    actual = expected.astype(np.float64)
    actual[:, -1] = 1e39  # beyond float32
    assert np.flatnonzero(profile(actual, expected, BY_NAME["logits"], config).channels).tolist() == [99]
    assert profile(expected, actual, BY_NAME["logits"], config).ulps[-1] == N_TOKENS


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
    found, *_ = findings(
        float64_weights(model), dump_run(model, passes(model), everywhere(injected, float64_weights(model)))
    )
    assert found.causes[0].name == name
    assert found.key == f"l0.{injected.stages[0]}"


@pytest.mark.parametrize("model", [GATED, PLAIN])
def test_the_order_in_which_an_engine_writes_its_experts_down_says_nothing(model: str) -> None:
    golden = golden_of(model)
    trace = dict(golden.engine_outputs["llamacpp"].traces["near"])
    for name in trace:
        axes = BY_NAME[name.rpartition(".")[2]].axes.split()
        if "topk" in axes:
            trace[name] = np.flip(trace[name], axis=axes.index("topk")).copy()
    assert list(findings(float64_weights(model), StageDump.of_arrays([golden.cases["near"]], trace))) == []


def test_an_expert_with_an_unnamed_bug_is_unknown_although_roundings_are_tried_in_pairs() -> None:
    golden = golden_of(PLAIN)
    trace = dict(golden.engine_outputs["transformers"].traces["near"])
    noise = np.random.default_rng(0).standard_normal(trace["l0.expert_out"].shape).astype(np.float32)
    shown = {"l0.expert_act": trace["l0.expert_act"], "l0.topk_ids": trace["l0.topk_ids"], "l0.expert_out": noise}
    (found,) = findings(float64_weights(PLAIN), StageDump.of_arrays([golden.cases["near"]], shown))
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
    results = {result.key: result for result in DumpChecker(Replay(float64_weights(PLAIN), dump)).results()}
    assert results["l0.topk_ids"].verdict == (FAIL if gap else PASS)


LIVE = pytest.mark.live  # transformers makes the models

CUTS = (0, 70, 71, 75)
IDS = tuple(i * 31 % 100 + 3 for i in range(CUTS[-1]))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    from builders.families import random_folder

    return open_weights(random_folder("qwen3_5", tmp_path_factory.mktemp("hybrid") / "m", 5))


def dump(
    weights: Weights, wrong: Callable[[int, str, np.ndarray], np.ndarray], suffixes: tuple[str, ...] = ()
) -> StageDump:
    """Three passes of llorch with an error; the dump has all stages, or those with these ends."""
    cache, traces = KVCache(weights.config, np.float32), [dict[str, np.ndarray]() for _ in CUTS[1:]]
    for n_pass, trace in enumerate(traces):

        def keep(name: str, array: np.ndarray, trace: dict = trace, n_pass: int = n_pass) -> np.ndarray:
            made = wrong(n_pass, name, array)
            if not suffixes or name.endswith(suffixes):
                trace[name] = made
            return made

        forward(np.asarray(IDS[CUTS[n_pass] : CUTS[n_pass + 1]]), weights, cache, keep=keep)
    passes = [Pass(IDS[a:b], a) for a, b in pairwise(CUTS)]
    return StageDump.of_arrays(passes, *traces)


@LIVE
@pytest.mark.nightly_cases(but=["suffixes2"])
@pytest.mark.parametrize(
    "suffixes", [(), *(pytest.param(x, marks=pytest.mark.slow) for x in (("block_out",), ("delta_out",)))]
)
def test_what_is_right_is_not_blamed(weights: Weights, suffixes: tuple[str, ...]):
    right = dump(weights, lambda n_pass, name, array: array, suffixes)
    assert list(findings(weights.astype(np.float64), right)) == []


@LIVE
@pytest.mark.nightly_cases(but=["l2.conv_state-1-<lambda>"])
@pytest.mark.parametrize(
    ("stage_key", "n_pass", "change"),
    [
        ("l0.delta_state", 0, np.zeros_like),  # the next pass forgets the prompt
        pytest.param("l1.beta", 0, lambda array: array * np.float32(1.001), marks=pytest.mark.slow),
        pytest.param("l2.conv_state", 1, lambda array: array[::-1].copy(), marks=pytest.mark.slow),
        pytest.param("l3.attn_gate", 2, lambda array: 1 - array, marks=pytest.mark.slow),
    ],
)
def test_what_is_wrong_is_found_where_it_is_made(weights: Weights, stage_key: str, n_pass: int, change):
    wrong = dump(weights, lambda n, name, array: change(array) if (name, n) == (stage_key, n_pass) else array)
    (finding,) = findings(weights.astype(np.float64), wrong)
    assert (finding.key, finding.n_pass) == (stage_key, n_pass)


@LIVE
@pytest.mark.parametrize("model", ["micro-qwen3.5-moe", "micro-qwen3-next"])
def test_a_memory_that_is_forgotten_between_passes_is_named(model: str):
    change = everywhere(mistake("delta-past-forgotten", model), float64_weights(model))
    (finding,) = findings(float64_weights(model), dump_run(model, passes(model, 10, 2), change))
    assert (finding.key, finding.n_pass, finding.causes[0].name) == ("l0.delta_state", 1, "delta-past-forgotten")


@pytest.mark.parametrize(("kinds", "right"), [((), True), (("rounding",), True), (("rounding", "unknown"), False)])
def test_a_dump_is_right_when_all_that_was_found_is_arithmetic(kinds: Any, right: bool):
    findings = [Finding(kind, "embed", 0, ("embed",), (), (), (), (), "") for kind in kinds]
    assert Diagnosis("m", "d", [], findings, {}).is_right == right
