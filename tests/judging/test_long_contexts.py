"""Long contexts and far positions: every built-in model, and bugs that only a long text or a far position shows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.refusals import refuses

from llorch.diagnosis.mistakes.planting import replaced
from llorch.files import Weights
from llorch.judging.expectations.long_contexts import IN_PARTS, WHOLE, chunk_bounds
from llorch.judging.goldens.long_contexts import LAST, N_LONG, read_long, save_long
from llorch.judging.runners import Runner
from llorch.judging.runners.numpy import FLOAT64, NumpyRunner
from llorch.judging.types import Comparison
from llorch.judging.verify import open_long_golden, stored
from llorch.runtime.builtin import EVERY
from llorch.stages.comparison import FAIL, PASS, Difference
from llorch.stages.stage_ref import Pass
from reference_outputs.make_long import refuse_far

MODEL = "micro-qwen2"  # has all cases
OF_ALL = {"long", "position 16390", "position 131080"}


def on_torch(weights: Weights) -> Runner:
    from llorch.judging.runners.torch import VARIANTS, TorchRunner
    from llorch.pytorch.device import target

    at = target("cpu", "float32")
    return TorchRunner(weights, at, VARIANTS[""], str(at))


BACKENDS: dict[str, Callable[[Weights], Runner]] = {
    "numpy": NumpyRunner, "float64": lambda weights: NumpyRunner(weights, FLOAT64), "torch": on_torch,
}  # fmt: skip


def long_rows(model: str, backend: str) -> list[Comparison]:
    if backend == "torch":
        pytest.importorskip("torch", reason="NOT RUN: torch is not installed")
    weights, _ = stored(model)
    return [*open_long_golden(model, weights).comparisons(BACKENDS[backend](weights))]


PLAIN = ("story-*", "micro-mistral-*", "micro-qwen2-numpy", "micro-qwen3.5-numpy", "micro-qwen3-moe-numpy")


@pytest.mark.nightly_cases(but=PLAIN)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", EVERY)
def test_long_contexts_and_far_positions_equal_the_reference(model: str, backend: str):
    comparisons = long_rows(model, backend)
    assert [c for c in comparisons if c.verdict != PASS] == []
    assert {c.stage_ref.run for c in comparisons} <= OF_ALL
    assert ("long" in {c.stage_ref.run for c in comparisons}) == (model != "story")  # whose context holds 512 tokens


def test_a_long_text_is_cut_into_chunks_of_three_sizes_and_single_steps():
    _, golden = stored(MODEL)
    long = open_long_golden(MODEL, stored(MODEL)[0]).golden.cases["long"]
    sizes = np.diff(chunk_bounds(long)[IN_PARTS])
    assert len(long.ids) == N_LONG
    assert {7, 64, 513, 1} <= set(sizes.tolist())
    assert sizes.sum() == N_LONG
    assert (sizes[-LAST:] == 1).all()
    assert golden.cases["near"].ids != long.ids


class Silent(NumpyRunner):
    """A runner that never shows one stage."""

    def in_chunks(self, inputs: Pass, bounds: Sequence[int], observe: Callable[[str, np.ndarray, int], None]) -> None:
        super().in_chunks(inputs, bounds, lambda name, *args: None if name == "l1.ffn_out" else observe(name, *args))


def test_a_stage_that_never_arrives_fails_in_every_case_and_mode():
    weights, _ = stored(MODEL)
    suite = open_long_golden(MODEL, weights)
    far = {case: inputs for case, inputs in suite.golden.cases.items() if case != "long"}
    suite.golden = replace(suite.golden, cases=far)  # a long text takes seconds
    comparisons = [c for c in suite.comparisons(Silent(weights)) if c.stage_ref.key == "l1.ffn_out"]
    assert {(c.stage_ref.run, c.mode) for c in comparisons} == {(case, WHOLE) for case in far}
    assert {c.verdict for c in comparisons} == {FAIL}


def test_goldens_whose_tolerance_could_not_fail_are_refused(tmp_path: Path):
    golden = open_long_golden(MODEL, stored(MODEL)[0]).golden
    save_long(tmp_path, replace(golden, distances={}))
    with refuses(ValueError, "no engine", "long", "regenerate.py"):
        read_long(tmp_path)
    refuse_far(Path("m.gguf"), "llamacpp", {"long": {"l0.ffn_up": Difference(0.0049, 0.0049)}})
    for error in (0.0051, np.inf, np.nan):
        with refuses(ValueError, "llamacpp", "long l0.ffn_up", expected=0.005, where="m.gguf"):
            refuse_far(Path("m.gguf"), "llamacpp", {"long": {"l0.ffn_up": Difference(error, error)}})


@pytest.mark.nightly_cases("long.safetensors.xz")
@pytest.mark.parametrize("missing", ["long.json", "long.safetensors.xz"])
def test_a_missing_golden_of_long_contexts_is_an_error(tmp_path: Path, missing: str):
    save_long(tmp_path, open_long_golden(MODEL, stored(MODEL)[0]).golden)
    (tmp_path / missing).unlink()
    with refuses(FileNotFoundError, tmp_path / missing, "regenerate.py"):
        read_long(tmp_path)


def windowed(size: int) -> Callable[[Any], Any]:
    """Queries that see the last `size` keys only."""

    def on_scores(right: Any) -> Any:
        def wrong(q: np.ndarray, k: np.ndarray, seen_from: np.ndarray | None = None) -> np.ndarray:
            seq, ctx = len(q), k.shape[1]
            return right(q, k, np.maximum(ctx - seq + np.arange(seq) - size + 1, 0 if seen_from is None else seen_from))

        return wrong

    return on_scores


def in_the_mask(change: Callable[[Any, int, int], Any]) -> Callable[[Any], Any]:
    """Change the mask of torch's attention, (seq, ctx)."""

    def on_attention(right: Any) -> Any:
        def wrong(q: Any, keys: Any, values: Any, visible: Any, keep: Any) -> Any:
            import torch

            seq, ctx = q.shape[1], keys.shape[2]
            all_before = torch.ones(seq, ctx, dtype=torch.bool).tril(ctx - seq)[None, None]
            return right(q, keys, values, change(all_before if visible is None else visible, seq, ctx), keep)

        return wrong

    return on_attention


def last_keys(size: int) -> Callable[[Any, int, int], Any]:
    def change(visible: Any, seq: int, ctx: int) -> Any:
        import torch

        return visible & torch.ones(seq, ctx, dtype=torch.bool).triu(ctx - seq - size + 1)

    return change


def without_itself(visible: Any, seq: int, ctx: int) -> Any:
    if 1 < seq < ctx:
        visible = visible.clone()
        visible[..., 0, ctx - seq] = False
    return visible


def blind_to_itself(right: Any) -> Any:
    """The first query of a chunk behind a cache does not see its own key."""

    def wrong(q: np.ndarray, k: np.ndarray, seen_from: np.ndarray | None = None) -> np.ndarray:
        scores = right(q, k, seen_from)
        if 1 < len(q) < k.shape[1]:
            scores[:, 0, k.shape[1] - len(q)] = -np.inf
        return scores

    return wrong


def turned_again(right: Any) -> Any:
    return lambda positions, **kwargs: right(positions % 16384, **kwargs)


def half_keys(right: Any) -> Any:
    """Keys beyond 256 entries of the cache are kept in float16."""

    def wrong(self: Any, layer: int, k: Any, v: Any, *place: Any) -> Any:
        if place:  # torch
            late = (place[0].slots >= 256)[..., None, None]
            return right(self, layer, k.where(~late, k.half().to(k.dtype)), v, *place)
        late = (self.length + np.arange(len(k)) >= 256)[:, None, None]
        return right(self, layer, np.where(late, k.astype(np.float16).astype(k.dtype), k), v)

    return wrong


def lost_at_growth(right: Any) -> Any:
    """The key of a step at which the cache grows is written one slot late, where the next one replaces it."""

    def wrong(self: Any, layer: int, k: np.ndarray, v: np.ndarray) -> Any:
        grows = self.length + len(k) > self._keys[layer].shape[1]
        keys, values = right(self, layer, k, v)
        if grows and len(k) == 1:
            keys[:, self.length] = 0
        return keys, values

    return wrong


SCORES, ATTENTION = "llorch.ops.attention.attention_scores", "llorch.pytorch.causal_lm.attention"
ANGLES, KEYS = "llorch.ops.rope.rope_tables", "llorch.model.cache.KVCache.append"
SLOTS = "llorch.pytorch.cache.Cache.append"
GROWTH = "a step one slot late at a growth"
# Sizes of windows: the smallest and the largest that a long text must show, and three between, drawn once.
SIZES = (64, 96, *np.random.default_rng(33).integers(97, 1100, 3).tolist(), 1100)
BUGS: dict[str, dict[str, Callable[[Any], Any]]] = {
    **{f"window of {n} keys": {SCORES: windowed(n), ATTENTION: in_the_mask(last_keys(n))} for n in SIZES},
    "positions modulo 16384": {ANGLES: turned_again},
    "keys beyond 256 in float16": {KEYS: half_keys, SLOTS: half_keys},
    GROWTH: {KEYS: lost_at_growth},
    "a first query that sees one key too few": {SCORES: blind_to_itself, ATTENTION: in_the_mask(without_itself)},
}


@contextmanager
def injected(bug: str, backend: str) -> Iterator[None]:
    with ExitStack() as stack:
        for part, wrong in BUGS[bug].items():
            if ".pytorch." not in part or backend == "torch":
                placing: AbstractContextManager[None] = replaced(part, wrong)
                stack.enter_context(placing)
        yield


# The cache of torch has its size from the start.
SHOWN = [(bug, backend) for bug in BUGS for backend in BACKENDS if (bug, backend) != (GROWTH, "torch")]


PLAIN_BUGS = (
    "window of 64 keys-numpy", "window of 1100 keys-numpy", "positions*-numpy", "keys beyond*-numpy", "a step*-numpy",
    "a first*-numpy", "keys beyond*-torch",
)  # fmt: skip


@pytest.mark.nightly_cases(but=PLAIN_BUGS)
@pytest.mark.parametrize(("bug", "backend"), SHOWN)
def test_a_bug_of_long_contexts_fails_by_ten_times_the_tolerance(bug: str, backend: str):
    if backend == "torch":
        pytest.importorskip("torch", reason="NOT RUN: torch is not installed")
    with injected(bug, backend):
        failed = [c for c in long_rows(MODEL, backend) if c.verdict == FAIL]
    assert max(c.difference.error / c.tolerance.error for c in failed) >= 10
