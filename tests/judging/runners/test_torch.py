import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from helpers.refusals import assert_tells, refuses
from helpers.stored_goldens import golden_of, weights_of
from helpers.torch_targets import target_or_skip

from llorch.judging.expectations.forward import ForwardExpectations
from llorch.judging.goldens.forward import EngineOutput
from llorch.judging.runner_check import RunnerCheck, check_runner
from llorch.judging.runners.torch import VARIANTS, TorchRunner, TorchVariant, plain, variants_for
from llorch.judging.runners.torch_observed import ObservedCase
from llorch.judging.tolerances.forward import SCORES
from llorch.judging.types import Comparison
from llorch.ops.compiled.library import library
from llorch.pytorch.cache import Cache
from llorch.pytorch.model import TorchModel
from llorch.runtime.errors import CheckpointMismatch
from llorch.stages.comparison import FAIL, PASS, TIE

NAME = "micro-qwen3"
HALF, SINGLE = "torch-cpu-bfloat16", "torch-cpu-float32"


def comparisons(
    runner: TorchRunner, kind: str = "stage_rows", engine_outputs: dict[str, EngineOutput] | None = None
) -> list[Comparison]:
    golden = golden_of(NAME)
    near = {"near": golden.cases["near"]}
    suite = ForwardExpectations(
        NAME, weights_of(NAME), near, engine_outputs or dict(golden.engine_outputs), golden.reference
    )
    return list(getattr(RunnerCheck(suite, runner), kind)())


@cache
def sound(target: str, suffix: str = "") -> TorchRunner:
    return TorchRunner(weights_of(NAME), target_or_skip(target), VARIANTS[suffix], f"{target}{suffix}")


def with_model(target: str, change: Callable[[TorchModel], Any]) -> TorchRunner:
    """The page with a loaded model that was changed."""

    def make(weights: Any, target: Any) -> TorchModel:
        model = plain(weights, target)
        change(model)
        return model

    return TorchRunner(weights_of(NAME), target_or_skip(target), TorchVariant(make, hidden=frozenset()), "changed")


def test_a_cache_that_was_used_has_other_numbers_in_every_slot_and_states_of_zero():
    model = plain(weights_of("micro-qwen3-next"), target_or_skip(SINGLE))
    observed = ObservedCase(model, golden_of("micro-qwen3-next").cases["near"])
    observed.fill_and_clear()
    cache = observed._cache
    assert all(bool(slots.all()) for slots in (*cache.keys, *cache.values))
    assert cache.state_tensors
    assert not any(bool(state.any()) for state in cache.state_tensors)


def test_a_state_that_is_not_forgotten_fails(monkeypatch: pytest.MonkeyPatch):
    golden, name = golden_of("micro-qwen3-next"), "micro-qwen3-next"
    runner = TorchRunner(weights_of(name), target_or_skip(SINGLE), VARIANTS[""], SINGLE)
    monkeypatch.setattr(Cache, "forget", lambda self: None)
    suite = ForwardExpectations(name, weights_of(name), golden.cases, golden.engine_outputs, golden.reference)
    assert any(c.verdict == FAIL and c.mode == "decode" for c in check_runner(suite, runner))


def test_a_model_in_another_dtype_than_the_target_is_refused():
    expected = ("torch.float32", "cpu", "torch-cpu-float32")
    with refuses(ValueError, expected=expected, got="torch.bfloat16"):
        with_model(SINGLE, lambda model: model.module.to(torch.bfloat16))


def test_a_stage_in_another_dtype_is_no_run_of_the_target():
    def widen(model: TorchModel) -> None:
        norm = model.module.model.norm
        norm.forward = lambda x, right=norm.forward: right(x).float()

    with refuses(CheckpointMismatch, expected=("torch.bfloat16", "cpu"), got="torch.float32", where="final_norm"):
        comparisons(with_model(HALF, widen))


def test_kernel_that_omits_a_stage_is_refused():
    def silence(model: TorchModel) -> None:
        for layer in model.module.model.layers:
            attention: Any = layer.self_attn
            attention.rotate = lambda *args, right=attention.rotate: right(*args[:-1], lambda name, stage: stage)

    with refuses(CheckpointMismatch, "l0.k_cache", where=(NAME, "changed")):
        comparisons(with_model(SINGLE, silence))


def test_a_stage_of_another_shape_fails_instead_of_being_broadcast():
    def cut(model: TorchModel) -> None:
        head = model.module.lm_head
        head.forward = lambda x, right=head.forward: right(x)[..., :1]

    bad = [c for c in comparisons(with_model(SINGLE, cut)) if c.verdict == FAIL]
    assert {c.stage_ref.name for c in bad} == {"logits"}
    assert all(c.note.startswith("shape: ") and "got (12, 1)" in c.note for c in bad)


@pytest.mark.parametrize("suffix", ["", "-batch"])
def test_isolated_stages_are_fed_the_golden_and_not_our_own(suffix: str):
    golden = golden_of(NAME).engine_outputs["llamacpp"]
    trace = dict(golden.traces["near"])
    trace["l0.attn_out"] = trace["l0.attn_out"] * 2
    changed = replace(golden, traces={"near": trace})
    made = comparisons(sound(SINGLE, suffix), engine_outputs={"llamacpp": changed})
    bad = {(c.stage_ref.name, c.stage_ref.layer) for c in made if c.mode == "isolated" and c.verdict == FAIL}
    assert bad == {("attn_out", 0), ("attn_residual", 0)}  # what is made from it is fed the golden's residual again


def test_in_half_precision_a_factor_of_one_per_cent_fails_its_isolated_stage_alone():
    def inject(model: TorchModel) -> None:
        for layer in model.module.model.layers:
            mlp: Any = layer.mlp
            mlp.act = lambda gate, up, right=mlp.act: 1.01 * right(gate, up)

    made = [c for c in comparisons(with_model(HALF, inject)) if c.mode == "isolated"]
    assert {(c.stage_ref.name, c.verdict) for c in made if c.stage_ref.name == "ffn_act"} == {("ffn_act", FAIL)}
    assert {c.stage_ref.name for c in made if c.verdict == FAIL} == {"ffn_act"}
    for comparison in (c for c in made if c.verdict == FAIL):
        assert comparison.difference.error <= comparison.tolerance.error
        assert 1.008 < comparison.difference.common_factor < 1.012
        tolerance = comparison.tolerance.common_factor
        assert tolerance is not None
        assert tolerance < 0.009
        assert_tells(comparison.note, f"{comparison.difference.common_factor:.4f}", f"{tolerance:.4f}")
        assert {"common_factor", "tolerance_factor"} <= comparison.record().keys()


@pytest.mark.parametrize("target", [SINGLE, HALF])
def test_common_factor_is_shown_only_where_it_is_compared(target: str):
    for comparison in comparisons(sound(target)):
        has_factor = target == HALF and comparison.mode == "isolated"
        record: dict[str, Any] = comparison.record()
        assert comparison.verdict != FAIL
        assert has_factor == (abs(record["common_factor"] - 1) <= record["tolerance_factor"]), comparison
        assert has_factor or math.isnan(record["common_factor"])


def test_in_half_precision_a_near_tie_is_shown_with_its_gap():
    by_stage = {c.stage_ref.name: c for c in comparisons(sound(HALF), "sampler_rows") if c.engine == "llamacpp"}
    for stage in ("argmax", "generation"):
        assert by_stage[stage].verdict == TIE
        assert re.fullmatch(r"token 0: .*, got .* 2.5e-03, .* 1.9e-01", by_stage[stage].note)


@pytest.mark.parametrize("target", [SINGLE, HALF])
def test_another_greedy_token_fails_unless_it_is_as_likely(target: str):
    golden = golden_of(NAME).engine_outputs["llamacpp"]
    other = golden.greedy.copy()
    other[3] += 1
    made = comparisons(sound(target), "sampler_rows", {"llamacpp": replace(golden, greedy=other)})
    assert [c.stage_ref.name for c in made if c.verdict == FAIL] == ["generation"]


@pytest.mark.parametrize("broken", [lambda text: text[::-1], lambda text: text[:-1]], ids=["wrong", "too short"])
@pytest.mark.parametrize("anew", [False, True])
def test_a_text_that_goes_wrong_or_ends_too_soon_fails(
    broken: Callable[[np.ndarray], np.ndarray], anew: bool, monkeypatch: pytest.MonkeyPatch
):
    """Also one that does so only where it is begun anew, behind a near-tie."""
    right, n = TorchRunner.text, len(golden_of(NAME).cases["near"].ids)

    def text(runner: TorchRunner, prompt: Sequence[int], n_tokens: int) -> np.ndarray:
        made = right(runner, prompt, n_tokens)
        return broken(made) if anew == (len(prompt) > n) else made

    monkeypatch.setattr(TorchRunner, "text", text)
    assert {c.verdict for c in comparisons(sound(HALF), "sampler_rows") if c.stage_ref.name == "generation"} == {FAIL}


def test_fused_attention_has_a_limit_of_its_own_derived_as_all_are():
    fused = comparisons(sound(SINGLE, "-sdpa"))
    plainly = {(c.stage_ref, c.mode): c.tolerance.error for c in comparisons(sound(SINGLE))}
    for comparison in fused:
        one, other = comparison.tolerance.error, plainly[comparison.stage_ref, comparison.mode]
        alone = (comparison.stage_ref.name, comparison.mode) == ("attn_context", "isolated")
        assert (other < one <= 10 * other) if alone else one == other
    assert {c.verdict for c in fused} == {PASS}


def test_compiled_and_packed_variants_are_checked_only_if_present():
    assert variants_for(target_or_skip(SINGLE), weights_of(NAME)) == [
        s for s in VARIANTS if s not in ("-compiled", "-packed")
    ]


@pytest.mark.parametrize("target", ["torch-cpu-float16", HALF])
def test_reproducible_attention_shows_its_scores_unless_it_is_compiled(target: str):
    runner = sound(target, "-reproducible")
    is_compiled = library() is not None and target == HALF
    assert runner.hidden == (SCORES if is_compiled else frozenset())
    assert {c.verdict for c in comparisons(runner)} <= {PASS, TIE}
