"""Templates that mean harm: refused with the documented code, in time, and the next one is rendered as ever."""

import time
from collections.abc import Iterator

import pytest
from hostile_templates import COSTS, ESCAPES

from llorch.errors import FormatError
from llorch.tokenizer.chat import ChatTemplate
from llorch.tokenizer.template_process import Limits, TemplateProcess

CHAT = [{"role": "user", "content": "Hi"}]
SLOWEST = 15  # seconds of a busy machine; what nothing stopped would take longer, a power of powers for ever
NAMED = (
    "text times two billion", "text doubled", "center", "wide format", "two loops", "slice", "power", "lipsum",
)  # fmt: skip


@pytest.fixture(scope="module")
def patient() -> Iterator[TemplateProcess]:
    """A process whose time suits a busy machine, for what is not about time."""
    process = TemplateProcess(Limits(seconds=30.0))
    yield process
    process.stop()


@pytest.fixture(scope="module")
def hasty() -> Iterator[TemplateProcess]:
    """A process with little time, so that these tests do not take a second each."""
    process = TemplateProcess(Limits(seconds=0.1))
    yield process
    process.stop()


def greeting() -> str:
    return ChatTemplate("{{ messages[0].content }}!", variables={}).render(CHAT)


@pytest.mark.parametrize("name", ESCAPES)
def test_a_template_reaches_nothing_but_its_data(name: str):
    with pytest.raises(FormatError, match=r"\ATemplateError: the chat template (refuses this|cannot be read): "):
        ChatTemplate(ESCAPES[name], variables={}).render(CHAT)
    assert greeting() == "Hi!"


@pytest.mark.parametrize("name", COSTS)
def test_a_template_that_costs_too_much_is_stopped(name: str, hasty: TemplateProcess, patient: TemplateProcess):
    assert patient.ask({"source": COSTS[name]}) == {"text": ""}  # compiling it computes nothing
    start = time.monotonic()
    found = hasty.ask({"source": COSTS[name], "variables": {"messages": CHAT}})
    assert (found["code"], time.monotonic() - start < SLOWEST) == ("TemplateBudget", True)


@pytest.mark.parametrize("name", NAMED)
def test_the_limits_of_real_use_are_kept(name: str):
    assert greeting() == "Hi!"
    start = time.monotonic()
    with pytest.raises(FormatError, match=r"\ATemplateBudget: the chat template (takes|writes) over "):
        ChatTemplate(COSTS[name], variables={}).render(CHAT)
    assert time.monotonic() - start < SLOWEST  # compiled and rendered
    assert greeting() == "Hi!"


@pytest.mark.parametrize(("count", "answer"), [(4 << 20, "text"), ((4 << 20) + 1, "code")])
def test_a_text_may_have_four_million_characters(count: int, answer: str, patient: TemplateProcess):
    found = patient.ask({"source": "{{ '\U0001f98a' * n }}", "variables": {"n": count}})
    assert (answer in found, found.get("text", "")) == (True, "\U0001f98a" * (count if answer == "text" else 0))
