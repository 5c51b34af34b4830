"""`/v1/responses` as the real `openai` client sees it."""

from typing import Any

import openai
import pytest
from helpers.served import Served

from llorch.model.model import load

START = "Once upon a time"
KINDS = ["created", "in_progress", "output_item.added", "content_part.added"]
ENDS = ["output_text.done", "content_part.done", "output_item.done"]


def create(server: Served, **asked: Any) -> Any:
    wanted: dict[str, Any] = {"model": "story", "input": START, "temperature": 0} | asked
    return server.client.responses.create(**wanted)


def solo(prompt: str, **options: Any) -> str:
    return "".join(token.text for token in load("story").generate(prompt, **options))


def test_an_answer_is_that_of_generate(server: Served):
    actual = create(server, max_output_tokens=20)
    assert actual.output_text == solo(START, max_tokens=20)
    assert (actual.status, actual.incomplete_details.reason, actual.error) == ("incomplete", "max_output_tokens", None)
    assert (actual.usage.input_tokens, actual.usage.output_tokens, actual.usage.total_tokens) == (5, 20, 25)
    assert (actual.output[0].role, actual.output[0].status) == ("assistant", "incomplete")


def test_instructions_come_first_and_pieces_are_one_text(server: Served):
    pieces: Any = [{"role": "user", "content": [{"type": "input_text", "text": START}]}]
    actual = create(server, input=pieces, instructions="Be kind.", max_output_tokens=6)
    assert actual.output_text == solo(f"Be kind.\n\n{START}", max_tokens=6)
    assert actual.instructions == "Be kind."


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
    actual = create(server, text=form, max_output_tokens=20)
    assert (actual.output_text.strip(), actual.status, actual.incomplete_details) == ("true", "completed", None)
    with server.client.responses.stream(model="story", input=START, text=form, max_output_tokens=20) as stream:
        assert stream.get_final_response().output_text.strip() == "true"


def test_text_format_json_object_with_a_schema_constrains_the_answer(server: Served):
    form: Any = {"format": {"type": "json_object", "schema": {"enum": [True]}}}
    actual = create(server, text=form, max_output_tokens=20)
    assert (actual.output_text.strip(), actual.status) == ("true", "completed")


def test_log_probabilities_are_those_of_a_chat_whole_and_as_a_stream(server: Served):
    asked: Any = {"model": "story", "temperature": 0, "top_logprobs": 3}
    wanted: Any = {"input": START, "include": ["message.output_text.logprobs"], "max_output_tokens": 9}
    turn: Any = {"role": "user", "content": START}
    chat = server.client.chat.completions.create(messages=[turn], logprobs=True, max_tokens=9, **asked)
    expected = [one.model_dump() for one in chat.choices[0].logprobs.content]
    assert len(expected) == 9
    assert all(len(one["top_logprobs"]) == 3 for one in expected)
    actual = server.client.responses.create(**asked, **wanted)
    assert [one.model_dump() for one in actual.output[0].content[0].logprobs] == expected
    with server.client.responses.stream(**asked, **wanted) as stream:
        events: list[Any] = list(stream)
    deltas = [one.to_dict() for event in events if event.type.endswith("text.delta") for one in event.logprobs]
    done = next(event for event in events if event.type == "response.output_text.done")
    final = events[-1].response.output[0].content[0].logprobs
    assert deltas == [one.to_dict() for one in done.logprobs] == [one.model_dump() for one in final] == expected


@pytest.mark.parametrize(
    ("asked", "field"),
    [({"top_logprobs": 3}, "top_logprobs"), ({"include": ["file_search_call.results"]}, "include.0")],
)
def test_unsupported_include_is_refused_by_name(server: Served, asked: dict[str, Any], field: str):
    with pytest.raises(openai.BadRequestError) as caught:
        create(server, **asked)
    assert caught.value.param == field


def test_without_being_asked_there_are_no_log_probabilities(server: Served):
    assert create(server, max_output_tokens=3).output[0].content[0].logprobs == []
