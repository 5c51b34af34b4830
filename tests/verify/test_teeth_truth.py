"""Teeth of the truth: mistakes in the code that every precision of ours runs, which no run of ours could show alone."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from builders.tiny_models import GGUF_METADATA, VOCAB, gguf_tensors, random_tensors, write_file, write_folder
from inject.planted import suite_of, weights_of

from llorch import forward as page
from llorch.cache import KVCache
from llorch.comparison import FAIL
from llorch.files import open_weights
from llorch.verify.float64_reference import WITNESS
from llorch.verify.judge import Comparison
from llorch.verify.models import plan_live, verify_live
from llorch.verify.runners.numpy import FLOAT64, NumpyRunner
from llorch.verify.tolerances.forward import MATHEMATICS

MODEL = "micro-qwen3"
IDS = (3, 1, 4, 15, 9, 2, 6, 5, 35, 8, 27, 13)
Plant = Callable[[pytest.MonkeyPatch], None]


def larger_eps(patch: pytest.MonkeyPatch) -> None:
    rms_norm = page.rms_norm
    patch.setattr(page, "rms_norm", lambda x, gain, *, eps: rms_norm(x, gain, eps=1.1 * eps))


def other_base(patch: pytest.MonkeyPatch) -> None:
    tables = page.rope_tables
    patch.setattr(page, "rope_tables", lambda *at, theta, **how: tables(*at, theta=1.00001 * theta, **how))


def other_scale(patch: pytest.MonkeyPatch) -> None:
    scores = page.attention_scores
    patch.setattr(page, "attention_scores", lambda q, k: scores(q * q.dtype.type(1 + 1e-9), k))


def other_gate(patch: pytest.MonkeyPatch) -> None:
    swiglu = page.swiglu
    patch.setattr(page, "swiglu", lambda gate, up: swiglu(gate * gate.dtype.type(1 + 1e-9), up))


def empty_cache(patch: pytest.MonkeyPatch) -> None:
    append = KVCache.append

    def zeros(self: KVCache, layer: int, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        keys, values = append(self, layer, k, v)
        return 0 * keys, 0 * values

    patch.setattr(KVCache, "append", zeros)


def other_sum(patch: pytest.MonkeyPatch) -> None:
    attention = page.attention
    patch.setattr(page, "attention", lambda h, *rest: attention(h, *rest) * h.dtype.type(1 + 1e-9))


PLANTED: dict[str, tuple[Plant, Sequence[str]]] = {  # and the stages that fail where each op stands alone
    "eps": (larger_eps, ("attn_norm", "q_norm", "k_norm", "ffn_norm", "final_norm")),
    "base": (other_base, ("q_rope", "k_rope")),
    "scale": (other_scale, ("attn_scores",)),
    "gate": (other_gate, ("ffn_act",)),
    "cache": (empty_cache, ("k_cache", "v_cache")),
    "residual": (other_sum, ("attn_residual",)),
}
planted = pytest.mark.parametrize("name", PLANTED)


def alone(rows: Sequence[Comparison]) -> set[str]:
    return {row.stage for row in rows if (row.producer, row.mode, row.verdict) == (WITNESS, "isolated", FAIL)}


def rows_in_float64() -> list[Comparison]:
    return suite_of(MODEL).rows(NumpyRunner(weights_of(MODEL), FLOAT64))


def test_float64_is_far_below_its_limit_of_the_truth():
    rows = rows_in_float64()
    assert {row.producer for row in rows} == {WITNESS}
    assert {row.mode for row in rows} == {"isolated", "chained", "decode", "exact"}
    assert max(row.error for row in rows) < MATHEMATICS.error / 4


@pytest.mark.plain_cases("cache", "eps")
@planted
def test_a_mistake_of_every_precision_fails_exactly_its_stages_in_float64(name: str, monkeypatch: pytest.MonkeyPatch):
    plant, stages = PLANTED[name]
    plant(monkeypatch)
    rows = rows_in_float64()
    assert alone(rows) == set(stages)
    assert {row.verdict for row in rows if row.mode == "chained" and row.stage == "logits"} == {FAIL}


@pytest.fixture(params=["file", "folder"])
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A random model that is not in the repository."""
    if request.param == "folder":
        return write_folder(tmp_path / "tiny", random_tensors("qwen3"), "qwen3")
    tensors = {name: values * np.float32(0.1) for name, values in gguf_tensors().items()}
    metadata = {**GGUF_METADATA, "tokenizer.ggml.model": "none", "llama.vocab_size": VOCAB}
    return write_file(tmp_path / "tiny.gguf", tensors, metadata)


@pytest.mark.live
def test_such_mistakes_fail_live_too(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    for plant, stages in PLANTED.values():
        with monkeypatch.context() as patch:
            plant(patch)
            found = alone(list(verify_live(plan_live(open_weights(elsewhere), IDS, ["llamacpp"]))))
        assert found == {s for s in stages if elsewhere.is_dir() or s not in ("q_norm", "k_norm")}
    assert alone(list(verify_live(plan_live(open_weights(elsewhere), IDS, ["llamacpp"])))) == set()
