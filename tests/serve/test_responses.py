"""`/v1/responses` as the real `openai` client sees it."""

from collections.abc import Iterator
from typing import Any

import pytest
from served import Served, served

from llorch.model import load

START = "Once upon a time"
KINDS = ["created", "in_progress", "output_item.added", "content_part.added"]
ENDS = ["output_text.done", "content_part.done", "output_item.done"]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        yield running


def create(server: Served, **asked: Any) -> Any:
    wanted: dict[str, Any] = {"model": "story", "input": START, "temperature": 0} | asked
    return server.client.responses.create(**wanted)


def solo(prompt: str, **how: Any) -> str:
    return "".join(token.text for token in load("story").generate(prompt, **how))


def test_an_answer_is_that_of_generate(server: Served):
    got = create(server, max_output_tokens=20)
    assert got.output_text == solo(START, max_tokens=20)
    assert (got.status, got.incomplete_details.reason, got.error) == ("incomplete", "max_output_tokens", None)
    assert (got.usage.input_tokens, got.usage.output_tokens, got.usage.total_tokens) == (5, 20, 25)
    assert (got.output[0].role, got.output[0].status) == ("assistant", "incomplete")


def test_instructions_come_first_and_pieces_are_one_text(server: Served):
    pieces: Any = [{"role": "user", "content": [{"type": "input_text", "text": START}]}]
    got = create(server, input=pieces, instructions="Be kind.", max_output_tokens=6)
    assert got.output_text == solo(f"Be kind.\n\n{START}", max_tokens=6)
    assert got.instructions == "Be kind."


def test_a_stream_is_the_events_that_the_client_knows(server: Served):
    with server.client.responses.stream(model="story", input=START, max_output_tokens=9, temperature=0) as stream:
        events: list[Any] = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    assert [name for name in names if name != "output_text.delta"] == [*KINDS, *ENDS, "incomplete"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == solo(START, max_tokens=9) == events[-1].response.output_text
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []
    assert events[-1].response.usage.output_tokens == 9


def test_an_answer_that_ends_itself_is_complete(server: Served):
    form: Any = {"format": {"type": "json_schema", "name": "a", "schema": {"enum": [True]}}}
    got = create(server, text=form, max_output_tokens=20)
    assert (got.output_text.strip(), got.status, got.incomplete_details) == ("true", "completed", None)
    with server.client.responses.stream(model="story", input=START, text=form, max_output_tokens=20) as stream:
        assert stream.get_final_response().output_text.strip() == "true"
