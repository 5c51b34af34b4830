"""Teeth of the suite: an op broken in the running code turns its checkpoint red, not only a variant in a table."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from inject.planted import golden_of, weights_of

from llorch import forward, generate
from llorch.cache import KVCache
from llorch.comparison import FAIL, PASS
from llorch.sampling import SamplingSettings, softmax
from llorch.verify.expectations.forward import ForwardSuite
from llorch.verify.goldens import SAMPLINGS
from llorch.verify.judge import Comparison
from llorch.verify.runners import numpy as runners

MODEL = "micro-qwen2"


def judge(rows: str) -> list[Comparison]:
    """Rows of one kind, on the near case and one producer."""
    golden = golden_of(MODEL)
    near = {"near": golden.cases["near"]}
    evidence = {"llamacpp": golden.evidence["llamacpp"]}
    suite = ForwardSuite(MODEL, weights_of(MODEL), near, evidence, golden.truth)
    return list(getattr(suite, rows)(runners.NumpyRunner(weights_of(MODEL))))


def first_fail(rows: list[Comparison]) -> tuple[str, str, int | None]:
    return next((row.checkpoint, row.stage, row.layer) for row in rows if row.verdict == FAIL)


def without_gain(x: np.ndarray, weight: np.ndarray, *, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def interleaved(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return np.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape).astype(x.dtype)


def unmasked(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    k = np.repeat(k, q.shape[1] // len(k), axis=0)
    return q.swapaxes(0, 1) @ k.swapaxes(1, 2) / q.dtype.type(q.shape[2] ** 0.5)


def tiled(probs: np.ndarray, v: np.ndarray) -> np.ndarray:
    mixed = probs @ np.tile(v, (len(probs) // len(v), 1, 1))
    return mixed.swapaxes(0, 1).reshape(probs.shape[1], -1)


NORMS, BIASED = ("attn_norm", "ffn_norm", "final_norm"), ("q_proj", "k_proj", "v_proj")
BROKEN = {  # op -> what is wrong, its checkpoint, and the stages that it makes
    "embedding": (lambda ids, weight: weight[ids + 1], "00", ("embed",)),
    "rms_norm": (without_gain, "01", NORMS),
    "rope": (interleaved, "01b", ("q_rope", "k_rope")),
    "linear": (lambda x, weight, bias=None: x @ weight.T, "02", BIASED),
    "attention_scores": (unmasked, "04", ("attn_scores",)),
    "attention_probs": (lambda scores: np.exp(scores), "04", ("attn_probs",)),
    "attention_context": (tiled, "05", ("attn_context",)),
    "swiglu": (lambda gate, up: up / (1 + np.exp(-up)) * gate, "06", ("ffn_act",)),
}


@pytest.mark.parametrize("op", BROKEN)
def test_an_op_broken_in_forward_fails_alone_at_its_stages_and_first_at_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch, op: str
):
    wrong, checkpoint, stages = BROKEN[op]
    monkeypatch.setattr(forward, op, wrong)
    rows = judge("stage_rows")
    assert first_fail([row for row in rows if row.mode == "chained"])[:2] == (checkpoint, stages[0])
    assert {row.stage for row in rows if row.mode == "isolated" and row.verdict == FAIL} == {*stages}


def forgetful(cache: KVCache, layer: int, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    keys, values = append(cache, layer, k, v)
    return keys * (np.arange(keys.shape[1]) >= keys.shape[1] - len(k))[:, None], values


def empty(cache: KVCache, layer: int, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(array * 0 for array in append(cache, layer, k, v))


append, context = KVCache.append, forward.attention_context
AFTER_A_CACHE: list[tuple[Any, str, Callable, str, set[str]]] = [  # what is wrong, where it shows, and without a cache
    (KVCache, "next_positions", lambda cache, n_tokens: np.arange(n_tokens), "q_rope", set()),
    (KVCache, "append", forgetful, "k_cache", set()),
    (KVCache, "append", empty, "k_cache", {"k_cache", "v_cache"}),
    (forward, "attention_context", lambda p, v: context(p, v) * (p.shape[1] == p.shape[2]), "attn_context", set()),
]


@pytest.mark.parametrize(("owner", "name", "wrong", "first", "alone"), AFTER_A_CACHE)
def test_what_is_wrong_after_a_cache_fails_there(
    owner: Any, name: str, wrong: Callable, first: str, alone: set[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(owner, name, wrong)
    assert first_fail(judge("decode_rows")) == ("03", first, 0)
    failing = [row for row in judge("stage_rows") if row.verdict == FAIL]
    assert {row.stage for row in failing if row.mode == "isolated"} == alone
    assert bool(failing) == bool(alone)


def test_a_token_after_the_best_one_fails_generation_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generate, "draw", lambda distribution, u: int(distribution.argmax() + 1) % distribution.size)
    failed = [(row.checkpoint, row.stage) for row in judge("sampler_rows") if row.verdict != PASS]
    assert failed == [("12", "generation")]


def test_filters_that_are_ignored_fail_checkpoint_11(monkeypatch: pytest.MonkeyPatch):
    def careless(logits: np.ndarray, settings: SamplingSettings, history: list[int]) -> np.ndarray:
        return softmax(logits / logits.dtype.type(settings.temperature))

    monkeypatch.setattr(runners, "probabilities", careless)
    failed = {(row.checkpoint, row.stage) for row in judge("sampler_rows") if row.verdict == FAIL}
    assert failed == {("11", f"probabilities.{name}") for name in SAMPLINGS if name != "temperature"}
