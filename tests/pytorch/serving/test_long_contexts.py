"""A prompt of 1,200 tokens through the paged cache of `llorch serve`, against the float64 reference."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.continuous import job, some_ids
from torch import Tensor

from llorch.diagnosis.mistakes.planting import replaced
from llorch.judging.goldens.long_contexts import LongGolden
from llorch.judging.verify import open_long_golden, stored
from llorch.pytorch.model import load_torch
from llorch.pytorch.serving.batch import ContinuousBatch
from llorch.pytorch.serving.pages import PAGE
from llorch.runtime.builtin import builtin_path
from llorch.stages.comparison import FACTOR

MODEL = "micro-qwen2"
N_TOP = 20


@pytest.fixture(scope="module")
def golden() -> LongGolden:
    return open_long_golden(MODEL, stored(MODEL)[0]).golden


@pytest.fixture
def model() -> Any:
    return load_torch(builtin_path(MODEL))


def served_top_logits(model: Any, golden: LongGolden) -> dict[int, float]:
    """Log probabilities of the likeliest tokens after the long text, which is read beside another prompt."""
    batch = ContinuousBatch(model, n_jobs=2, n_tokens=4096)
    other = batch.join(job(some_ids(model, 300), 64))
    ticket = batch.join(job(golden.cases["long"].ids, 1, n_top=N_TOP))
    assert other is not None
    assert ticket is not None
    for _ in range(100):
        made = batch.step().get(ticket)
        if made is not None:
            assert not isinstance(made, Exception), made
            batch.leave(ticket)
            batch.leave(other)
            return dict(made.top)
    raise AssertionError("no token after 100 steps")


def error(top: dict[int, float], golden: LongGolden) -> float:
    """Largest error of a log probability, in units of what the farther engine's logits are off."""
    logits = golden.reference["long"]["logits"][-1]
    true = logits - logits.max()
    true -= np.log(np.exp(true).sum())
    engines = (cases["long"]["logits"].worst for cases in golden.distances.values())
    unit = FACTOR * max(engines) * np.abs(golden.reference["long"]["logits"]).max()
    return max(abs(logprob - true[token]) for token, logprob in top.items()) / unit


def test_a_served_answer_to_a_long_prompt_equals_the_reference(model: Any, golden: LongGolden):
    top = served_top_logits(model, golden)
    assert len(top) == N_TOP
    assert error(top, golden) < 1


def with_changed_mask(change: Callable[[Tensor, int, int], Tensor]) -> Callable[[Any], Any]:
    """Change what the tokens of a pass see."""

    def on_attention(right: Any) -> Any:
        def wrong(q: Tensor, keys: Tensor, values: Tensor, visible: Any, keep: Any) -> Tensor:
            seq, ctx = q.shape[1], keys.shape[2]
            before = torch.ones(seq, ctx, dtype=torch.bool).tril(ctx - seq)[None, None]
            return right(q, keys, values, change(before if visible is None else visible, seq, ctx), keep)

        return wrong

    return on_attention


def keep_last_keys(size: int) -> Callable[[Tensor, int, int], Tensor]:
    def change(visible: Tensor, seq: int, ctx: int) -> Tensor:
        newest = visible.long().cumsum(-1).amax(-1, keepdim=True)  # keys that a token sees
        return visible & (visible.long().cumsum(-1) > newest - size)

    return change


def hide_own_key(visible: Tensor, seq: int, ctx: int) -> Tensor:
    """The first query of a chunk behind a cache does not see its own key."""
    visible = visible.clone()
    own = visible[..., 0, :].long().cumsum(-1).argmax(-1)
    visible[..., 0, :].scatter_(-1, own[..., None], own[..., None] == 0)
    return visible


@pytest.mark.parametrize(
    "change",
    [keep_last_keys(64), keep_last_keys(500), keep_last_keys(1100), hide_own_key],
    ids=["64", "500", "1100", "first query"],
)
def test_attention_mask_fault_in_a_long_prompt_is_detected(
    model: Any, golden: LongGolden, change: Callable[..., Tensor]
):
    for module in model.module.modules():
        if hasattr(module, "attend"):
            module.attend = with_changed_mask(change)(module.attend)
    assert error(served_top_logits(model, golden), golden) > 2  # the answer above is within 1


def round_keys_to_half(k: Tensor, slots: Tensor) -> Tensor:
    return k.where((slots < 256)[..., None, None], k.half().to(k.dtype))


def without_the_first_of_a_page(k: Tensor, slots: Tensor) -> Tensor:
    return k.where((slots % PAGE != 0)[..., None, None], torch.zeros_like(k))


@pytest.mark.parametrize("change", [round_keys_to_half, without_the_first_of_a_page])
def test_page_write_fault_is_detected(golden: LongGolden, change: Callable[..., Tensor]):
    model = load_torch(builtin_path(MODEL), kernels="torch")  # a fused kernel writes keys without `append`

    def wrong(right: Any) -> Any:
        return lambda cache, layer, k, v, place: right(cache, layer, change(k, place.slots), v, place)

    assert error(served_top_logits(model, golden), golden) < 1
    with replaced("llorch.pytorch.cache.Cache.append", wrong):
        assert error(served_top_logits(model, golden), golden) > 2
