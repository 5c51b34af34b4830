"""Teeth where both engines run now: decoding, sampling and generation of random models with many tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import tiny_models
from builders.tiny_models import GGUF_METADATA, gguf_tensors, random_tensors, write_file, write_folder
from inject.planted_torch import PLANTED
from runs.torch_targets import on

from llorch import forward, generate, sampling
from llorch.cache import KVCache
from llorch.comparison import FAIL, PASS
from llorch.files import Weights, open_weights
from llorch.pytorch.device import Target
from llorch.pytorch.model import TorchModel
from llorch.verify.expectations.forward import ForwardSuite
from llorch.verify.goldens import PRODUCERS
from llorch.verify.judge import Comparison
from llorch.verify.models import ask, plan_live
from llorch.verify.runners import Runner
from llorch.verify.runners.numpy import NumpyRunner
from llorch.verify.runners.torch import TorchRunner, TorchVariant, plain

VOCAB = 32_000
IDS = (3, 1, 4, 15, 9, 2, 6, 5, 31_999, 7_777)
TARGET = "torch-cpu-float32"

pytestmark = pytest.mark.live


def with_vocabulary(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same model with more tokens."""
    rng = np.random.default_rng(9)
    more = {name: (VOCAB, array.shape[1]) for name, array in tensors.items() if len(array) == tiny_models.VOCAB}
    return tensors | {name: rng.standard_normal(shape, np.float32) / np.float32(3) for name, shape in more.items()}


@pytest.fixture(scope="module", params=["file", "folder"])
def judge(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ForwardSuite:
    path: Path = tmp_path_factory.mktemp("live") / "model"
    if request.param == "file":
        metadata = GGUF_METADATA | {"tokenizer.ggml.model": "no_vocab", "llama.vocab_size": VOCAB}
        path = write_file(path.with_suffix(".gguf"), with_vocabulary(gguf_tensors()), metadata)
    else:
        write_folder(path, with_vocabulary(random_tensors("qwen3")), "qwen3", vocab_size=VOCAB)
    plan = plan_live(open_weights(path), IDS, PRODUCERS)
    shown = ask(plan, say=print, failed=None)
    return ForwardSuite("m", shown.weights, plan.cases, shown.evidence, shown.truth)


def judged(suite: ForwardSuite, runner: Runner) -> list[Comparison]:
    return [*suite.decode_rows(runner), *suite.sampler_rows(runner)]


def first_red(rows: list[Comparison]) -> tuple[str, str]:
    return next((row.checkpoint, row.stage) for row in rows if row.verdict == FAIL)


def lose_context(patch: pytest.MonkeyPatch) -> None:
    right = forward.attention_context
    patch.setattr(forward, "attention_context", lambda p, v: right(p, v) * (p.shape[1] == p.shape[2]))


def empty_the_cache(patch: pytest.MonkeyPatch) -> None:
    append = KVCache.append
    patch.setattr(KVCache, "append", lambda *given: tuple(array * 0 for array in append(*given)))


def make_logits_constant(patch: pytest.MonkeyPatch) -> None:
    right = forward.linear

    def wrong(x: np.ndarray, weight: np.ndarray, *bias: Any) -> np.ndarray:
        made = right(x, weight, *bias)
        return np.ones_like(made) if len(weight) == VOCAB else made

    patch.setattr(forward, "linear", wrong)


def take_the_token_after(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(generate, "draw", lambda distribution, u: int(distribution.argmax() + 1) % VOCAB)


def drop_the_crossing_token(patch: pytest.MonkeyPatch) -> None:
    right = sampling.keep_top_p

    def wrong(logits: np.ndarray, *, p: float) -> np.ndarray:
        kept = right(logits, p=p)
        return np.where((kept == kept[kept > -np.inf].min()) & (p < 1), -np.inf, kept)

    patch.setattr(sampling, "keep_top_p", wrong)


NUMPY: dict[Callable[[pytest.MonkeyPatch], None], tuple[str, str]] = {
    lose_context: ("03", "attn_context"),
    empty_the_cache: ("03", "k_cache"),
    make_logits_constant: ("03", "logits"),
    take_the_token_after: ("12", "generation"),
    drop_the_crossing_token: ("11", "probabilities.top_p"),
}
TORCH = {
    "context lost after a cache": ("03", "attn_context"),
    "logits constant": ("03", "logits"),
    "token after the best one": ("12", "generation"),
    "top-p drops the crossing token": ("11", "probabilities.top_p"),
}


@pytest.mark.parametrize("plant", NUMPY, ids=lambda plant: plant.__name__)
def test_a_mistake_in_numpy_is_red_where_it_is(judge: ForwardSuite, plant: Callable, monkeypatch: pytest.MonkeyPatch):
    runner = NumpyRunner(judge.weights)
    assert {row.verdict for row in judged(judge, runner)} == {PASS}
    plant(monkeypatch)
    rows = judged(judge, runner)
    assert first_red(rows) == NUMPY[plant]
    assert {row.verdict for row in rows} == {PASS, FAIL}


@pytest.mark.parametrize("name", [None, *TORCH])
def test_a_mistake_in_torch_is_red_where_it_is(judge: ForwardSuite, name: str | None, monkeypatch: pytest.MonkeyPatch):
    def make(weights: Weights, at: Target) -> TorchModel:
        model = plain(weights, at)
        if name is not None:
            PLANTED[name].plant(model.module, monkeypatch)
        return model

    rows = judged(judge, TorchRunner(judge.weights, on(TARGET), TorchVariant(make, hidden=frozenset()), TARGET))
    assert {row.verdict for row in rows} == ({PASS} if name is None else {PASS, FAIL})
    if name is not None:
        assert first_red(rows) == TORCH[name]
