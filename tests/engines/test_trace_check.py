"""A capture is used only when it is exactly the stages of the model, each once and in its shape."""

import re
from dataclasses import replace

import numpy as np
import pytest
from helpers.refusals import assert_tells, refuses
from helpers.stored_goldens import golden_of, weights_of

from llorch.engines import open_in_process as open_engine
from llorch.engines.interface import check_ids, checked_trace

NAME = "micro-qwen3"
CONFIG = weights_of(NAME).config


@pytest.fixture
def captured_stages() -> dict[str, np.ndarray]:
    return dict(golden_of(NAME).engine_outputs["llamacpp"].traces["far"])


def test_complete_capture_is_returned_contiguous_in_forward_order(captured_stages: dict[str, np.ndarray]):
    expected = {**captured_stages, "logits": np.asfortranarray(captured_stages["logits"])}
    actual = checked_trace(dict(reversed(expected.items())), CONFIG, 8, "engine")
    assert list(actual)[:2] == ["embed", "l0.attn_norm"]
    assert list(actual)[-1] == "logits"
    assert actual.keys() == expected.keys()
    for key, array in actual.items():
        assert array.flags.c_contiguous
        np.testing.assert_array_equal(array, expected[key], strict=True)


def test_missing_unexpected_and_misshapen_stages_are_refused_and_all_named(captured_stages: dict[str, np.ndarray]):
    del captured_stages["l1.k_norm"]
    captured_stages["l9.k_norm"] = np.zeros((8, 2), np.float32)
    captured_stages["l0.q_rope"] = captured_stages["l0.q_rope"].swapaxes(0, 1)
    captured_stages["final_norm"] = captured_stages["final_norm"].astype(np.float64)
    captured_stages["logits"] = captured_stages["logits"][-1:]
    q_rope, last = (8, CONFIG.n_heads, CONFIG.head_dim), (8, CONFIG.hidden_size)
    wanted = {"l0.q_rope": q_rope, "final_norm": last, "logits": (8, CONFIG.vocab_size)}
    found = {
        "l0.q_rope": f"float32 {(q_rope[1], 8, q_rope[2])}",
        "final_norm": f"float64 {last}",
        "logits": f"float32 {(1, CONFIG.vocab_size)}",
    }
    with refuses(RuntimeError, where="engine") as caught:
        checked_trace(captured_stages, CONFIG, 8, "engine")
    missing, unexpected, *others = str(caught.value).split("; ")
    assert_tells(missing, "l1.k_norm", "missing")
    assert_tells(unexpected, "l9.k_norm", "unexpected")
    assert len(others) == len(found)
    for name in found:
        (fault,) = [fault for fault in others if fault.startswith(name)]
        assert_tells(fault, f"float32 {wanted[name]}", got=found[name])


@pytest.mark.parametrize("name", ["logits", "l0.attn_scores", "l1.v_cache"])
def test_missing_token_is_refused(captured_stages: dict[str, np.ndarray], name: str):
    captured_stages[name] = captured_stages[name][..., :-1]
    with refuses(RuntimeError, name, "float32", where="engine"):
        checked_trace(captured_stages, CONFIG, 8, "engine")


def test_a_stage_of_another_model_is_refused(captured_stages: dict[str, np.ndarray]):
    with refuses(RuntimeError, where="engine") as caught:
        checked_trace(captured_stages, replace(CONFIG, family="qwen2", qk_norm=False), 8, "engine")
    faults = str(caught.value).split("; ")
    names = {f"l{layer}.{part}_norm" for layer in (0, 1) for part in "qk"}
    assert {re.findall(r"\bl\d+\.\w+", fault)[0] for fault in faults} == names
    assert ["unexpected" in fault for fault in faults] == [True] * 4


@pytest.mark.parametrize("ids", [(), (CONFIG.vocab_size,), (0, -1)])
def test_ids_outside_the_vocabulary_are_refused(ids: tuple[int, ...]):
    check_ids((0, CONFIG.vocab_size - 1), CONFIG)
    with refuses(ValueError, expected=f"0 to {CONFIG.vocab_size - 1}", got=ids[-1] if ids else "none", where="ids"):
        check_ids(ids, CONFIG)


@pytest.mark.live
def test_duplicate_node_is_refused(monkeypatch: pytest.MonkeyPatch):
    from llorch.engines.llamacpp_graph import GraphCapture  # needs the engine

    keep = GraphCapture.keep
    monkeypatch.setattr(GraphCapture, "keep", lambda self, tensor: [keep(self, tensor), keep(self, tensor)][0])
    with open_engine("llamacpp", weights_of(NAME).path) as engine:
        with refuses(RuntimeError, "embed", "embd", where="llama.cpp"):
            engine.trace((3, 1, 4))


@pytest.mark.live
def test_a_stage_without_a_node_is_refused_with_its_rule_and_file(monkeypatch: pytest.MonkeyPatch):
    from llorch.engines import llamacpp_graph

    rules = (("ffn_gate", "MUL_MAT", "no_such_node", None), *llamacpp_graph._FEED_FORWARD_RULES[1:])
    monkeypatch.setattr(llamacpp_graph, "_FEED_FORWARD_RULES", rules)
    with open_engine("llamacpp", weights_of(NAME).path) as engine:
        with refuses(RuntimeError, "MUL_MAT", "no_such_node-0", "llamacpp_graph.py", where="l0.ffn_gate"):
            engine.trace((3, 1, 4))


@pytest.mark.live
def test_a_stage_that_is_computed_twice_is_refused():
    from llorch.engines.transformers import Transformers
    from llorch.engines.transformers_capture import captured as watched

    with Transformers(weights_of(NAME).path) as engine, watched(engine._model, engine.config):
        engine.logits((3, 1, 4))
        with refuses(RuntimeError, "stage", "twice", where="transformers"):
            engine.logits((3, 1, 4))
