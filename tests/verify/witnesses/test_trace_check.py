"""A capture is used only when it is exactly the stages of the model, each once and in its shape."""

from dataclasses import replace

import numpy as np
import pytest
from planted import golden_of, weights_of

from llorch.verify.witnesses import check_ids, checked_trace
from llorch.verify.witnesses import open_here as open_producer

NAME = "micro-qwen3"
CONFIG = weights_of(NAME).config


@pytest.fixture
def captured() -> dict[str, np.ndarray]:
    return dict(golden_of(NAME).evidence["llamacpp"].traces["far"])


def test_a_whole_capture_is_given_back_in_forward_order_and_contiguous(captured: dict[str, np.ndarray]):
    want = {**captured, "logits": np.asfortranarray(captured["logits"])}
    got = checked_trace(dict(reversed(want.items())), CONFIG, 8, "engine")
    assert list(got)[:2] == ["embed", "l0.attn_norm"]
    assert list(got)[-1] == "logits"
    assert got.keys() == want.keys()
    for key, array in got.items():
        assert array.flags.c_contiguous
        np.testing.assert_array_equal(array, want[key], strict=True)


def test_missing_unexpected_and_misshapen_stages_are_refused_and_all_named(captured: dict[str, np.ndarray]):
    del captured["l1.k_norm"]
    captured["l9.k_norm"] = np.zeros((8, 2), np.float32)
    captured["l0.q_rope"] = captured["l0.q_rope"].swapaxes(0, 1)
    captured["final_norm"] = captured["final_norm"].astype(np.float64)
    captured["logits"] = captured["logits"][-1:]
    with pytest.raises(RuntimeError) as caught:
        checked_trace(captured, CONFIG, 8, "engine")
    text = str(caught.value)
    assert text.startswith("engine: the capture is not the expected set of stages: l1.k_norm is missing; ")
    assert "; l9.k_norm is unexpected; " in text
    q_rope = (8, CONFIG.n_heads, CONFIG.head_dim)
    assert f"l0.q_rope must be float32 {q_rope}, got float32 {(q_rope[1], 8, q_rope[2])}" in text
    assert f"final_norm must be float32 {(8, CONFIG.hidden_size)}, got float64 {(8, CONFIG.hidden_size)}" in text
    assert f"logits must be float32 {(8, CONFIG.vocab_size)}, got float32 {(1, CONFIG.vocab_size)}" in text


@pytest.mark.parametrize("name", ["logits", "l0.attn_scores", "l1.v_cache"])
def test_one_token_too_few_is_refused(captured: dict[str, np.ndarray], name: str):
    captured[name] = captured[name][..., :-1]
    with pytest.raises(RuntimeError, match=f"{name} must be float32"):
        checked_trace(captured, CONFIG, 8, "engine")


def test_a_stage_of_another_model_is_refused(captured: dict[str, np.ndarray]):
    with pytest.raises(RuntimeError, match=r"set of stages: (l[01]\.[qk]_norm is unexpected(; )?){4}$"):
        checked_trace(captured, replace(CONFIG, family="qwen2", qk_norm=False), 8, "engine")


@pytest.mark.parametrize("ids", [(), (CONFIG.vocab_size,), (0, -1)])
def test_ids_that_the_model_does_not_have_are_refused(ids: tuple[int, ...]):
    check_ids((0, CONFIG.vocab_size - 1), CONFIG)
    with pytest.raises(ValueError, match=f"ids: expected one or more from 0 to {CONFIG.vocab_size - 1}, got"):
        check_ids(ids, CONFIG)


@pytest.mark.live
def test_a_node_that_comes_twice_is_refused(monkeypatch: pytest.MonkeyPatch):
    from llorch.verify.witnesses.llamacpp_graph import GraphCapture  # needs the engine

    keep = GraphCapture.keep
    monkeypatch.setattr(GraphCapture, "keep", lambda self, tensor: [keep(self, tensor), keep(self, tensor)][0])
    with open_producer("llamacpp", weights_of(NAME).path) as engine:
        with pytest.raises(RuntimeError, match=r"llama\.cpp: two nodes match embed, the second is embd"):
            engine.trace((3, 1, 4))


@pytest.mark.live
def test_a_stage_that_is_computed_twice_is_refused():
    from llorch.verify.witnesses.transformers import Transformers
    from llorch.verify.witnesses.transformers_capture import captured as watched

    with Transformers(weights_of(NAME).path) as engine, watched(engine._model, engine.config):
        engine.logits((3, 1, 4))
        with pytest.raises(RuntimeError, match=r"stage .* was computed twice in one run"):
            engine.logits((3, 1, 4))
