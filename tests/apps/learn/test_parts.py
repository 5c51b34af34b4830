"""Parts in place of llorch's functions: the reference changes nothing there, and the outputs of a part are checked."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.refusals import assert_tells

from llorch.apps.learn.check import check_functions
from llorch.apps.learn.checks import after_logits
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.judging import judge_with_arrays
from llorch.apps.learn.lessons import BY_NUMBER, PARTS
from llorch.apps.learn.verdict import LessonReport
from llorch.judging.types import Expectation
from llorch.model.model import Model, load
from llorch.ops.sampling import SamplingSettings
from llorch.runtime.builtin import BUILTIN
from llorch.stages.comparison import FAIL, PASS, Tolerance
from llorch.stages.stage_ref import StageRef

TEXT = " two  spaces, Grüße 世界 🦊 and 1234567\n\tlines"


def reference(*names: str) -> Implementation:
    return Implementation("reference", {name: PARTS[name].reference for name in names})


@pytest.mark.parametrize("model", BUILTIN)
def test_the_merge_loop_gives_the_ids_and_the_places_of_the_tokenizer(model: str):
    weights = load(model).weights
    with reference("merge").installed():
        found = Model(weights).tokenizer.encode_spans(TEXT)
    assert found == Model(weights).tokenizer.encode_spans(TEXT)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_by_parts_is_the_text_without_them(temperature: float):
    story = load("story")

    def text() -> list:
        settings = SamplingSettings(temperature=temperature, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.1)
        return [*story.generate("Once upon", max_tokens=12, settings=settings if temperature else None)]

    with reference(*(name for name in PARTS if not PARTS[name].on_torch)).installed():
        found = text()
    assert [(token.id, token.finish) for token in found] == [(token.id, token.finish) for token in text()]
    assert [token.logprob for token in found] == pytest.approx([token.logprob for token in text()], abs=1e-5)


def test_a_list_is_as_good_as_a_stream():
    def generate(step: Callable, prompt: np.ndarray, max_tokens: int) -> list[int]:
        return [*PARTS["generate"].reference(step=step, prompt=prompt, max_tokens=max_tokens)]

    with Implementation("list", {"generate": generate}).installed():
        found = [*load("micro-llama").generate("Once", max_tokens=6)]
    assert found == [*load("micro-llama").generate("Once", max_tokens=6)]


def outside(step: Callable, prompt: np.ndarray, max_tokens: int) -> Iterator[int]:
    step(prompt)
    yield 10**6


def endless(step: Callable, prompt: np.ndarray, max_tokens: int) -> Iterator[int]:
    yield from PARTS["generate"].reference(step=step, prompt=prompt, max_tokens=max_tokens)
    while True:
        yield 0


def beyond(data: np.ndarray) -> tuple:
    names, shapes, types, offsets = PARTS["tensor_table"].reference(data=data)
    return names, shapes, types, offsets + data.size


def of_no_type(data: np.ndarray) -> tuple:
    names, shapes, types, offsets = PARTS["tensor_table"].reference(data=data)
    return names, shapes, types + 999, offsets


@pytest.mark.parametrize(
    ("lesson", "part", "function", "facts"),
    [
        ("12", "generate", lambda step, prompt, max_tokens: [0.5], ["TypeError", "'float'"]),
        ("12", "generate", lambda step, prompt, max_tokens: [1], [1, "step"]),
        ("12", "generate", outside, [10**6, "token"]),
        ("12", "generate", lambda step, prompt, max_tokens: None, ["TypeError", "'NoneType'"]),
        ("12", "generate", endless, ["max_tokens"]),
        ("00", "tensor_table", beyond, ["token_embd.weight", "1365696 to 1519680", 1354272]),
        ("00", "tensor_table", of_no_type, ["token_embd.weight", 999]),
        ("00", "merge", lambda **arguments: PARTS["merge"].reference(**arguments) + 10**6, [1000006, "piece"]),
    ],
    ids=["halves", "no_step", "outside", "no_words", "endless", "beyond", "of_no_type", "of_no_piece"],
)
def test_unusable_results_are_reported(lesson: str, part: str, function: Callable, facts: list[object]):
    found = check_functions(lesson, **{part: function})
    assert found.label == FAIL
    assert_tells(found.fault.splitlines()[0], part, *facts)


@pytest.mark.slow
def test_fault_after_a_known_mistake_is_a_note():
    def text_again(step: Callable, prompt: np.ndarray, max_tokens: int) -> Iterator[int]:
        text = [*prompt]
        for _ in range(max_tokens):  # in a later model the context does not hold it
            text.append(int(np.argmax(step(text))))
            yield text[-1]

    found = check_functions("12", generate=text_again)
    assert (found.label, found.fault) == (FAIL, "")
    assert [each.name for each in found.causes] == ["generation-text-fed-again"]
    assert_tells(found.notes[0], "generate", "UserError", 512)


def test_top_p_without_crossing_token_is_named_where_p_is_one_too():
    def keep_top_p(logits: np.ndarray, p: float) -> np.ndarray:
        order, weights = np.argsort(-logits, kind="stable"), np.exp(logits - logits.max())
        kept = order[np.cumsum(weights[order] / weights.sum()) < p]
        return np.where(np.isin(np.arange(logits.size), kept), logits, -np.inf)

    found = check_functions("11", keep_top_p=keep_top_p)
    assert [each.name for each in found.causes] == ["top-p-without-crossing"]


def test_a_right_table_of_other_strides_passes():
    def tensor_table(data: np.ndarray) -> tuple:
        names, shapes, types, offsets = PARTS["tensor_table"].reference(data=data)
        return names, np.asfortranarray(shapes), types, offsets

    found = check_functions("00", tensor_table=tensor_table)
    assert {each.verdict for each in found.comparisons} == {PASS}


@pytest.mark.parametrize(("n_kept", "names"), [(9, ["edge-of-top-p"]), (7, [])])
def test_a_token_at_the_edge_of_top_p_is_no_bug(monkeypatch: pytest.MonkeyPatch, n_kept: int, names: list[str]):
    def uniform(n: int) -> np.ndarray:
        return np.where(np.arange(10) < n, 1 / n, 0).astype(np.float32)

    suite = SimpleNamespace(sampler_inputs=lambda: (np.zeros(10, np.float32), [0]))
    monkeypatch.setattr(after_logits, "suite_of", lambda model: suite)
    place = StageRef("11", "probabilities", part="top_p")
    expectation = Expectation(place, "isolated", "llamacpp", uniform(8), Tolerance(1e-6, 1e-6))
    wrong = judge_with_arrays(expectation, uniform(n_kept), model="m", backend="learner")
    assert wrong.verdict == FAIL
    found = after_logits.FilterCheck().find_causes(BY_NUMBER["11"], Implementation("x", {}), "isolated", [("", wrong)])
    assert [each.name for each in found if not each.stages] == names
    assert str(LessonReport("11", PASS, causes=found[:1])).count("not your bug") == len(names)
