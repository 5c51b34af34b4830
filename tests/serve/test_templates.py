"""Chat templates that a server renders for its clients: what they cost and refuse is the affair of one request."""

import threading
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_models import LLAMA_3, chat_model
from refusals import assert_tells
from served import Served, served

WRITES = "{% for i in range(30) %}{{ 'a b' * 12000 }}{% endfor %}"  # 1.08 MB


def asked(server: Served, content: str = "Once") -> Any:
    return server.client.chat.completions.create(
        model="story", messages=[{"role": "user", "content": content}], max_tokens=2
    )


def refused(folder: Path, template: str) -> openai.BadRequestError:
    with served(chat_model(folder / "story", "story", template)) as server:
        with pytest.raises(openai.BadRequestError) as caught:
            asked(server)
        server.client.completions.create(model="story", prompt="Once", max_tokens=2)
    return caught.value


@pytest.mark.parametrize(
    ("template", "facts"),
    [
        ("{% if %}", ["template of story", "read"]),
        ("{{ ''.__class__.__mro__ }}", ["template of story", "'__class__'"]),
        ("{{ 'a' * 2000000000 }}", ["template of story", "512 MiB"]),
        (WRITES, ["messages", 1080000, 1048576]),
        # what ends an answer is asked with a conversation of our own
        ("{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}a", ["story", ": no;"]),
    ],
    ids=["broken", "attribute", "memory", "text", "raised"],
)
def test_what_a_template_does_is_told_to_one_request_and_not_where_its_file_lies(
    tmp_path: Path, template: str, facts: list[object]
):
    error = refused(tmp_path, template)
    assert_tells(error.message, *facts)
    assert error.param == "messages"
    assert str(tmp_path) not in error.message


def test_nobody_else_waits_for_a_template_that_takes_its_time(tmp_path: Path):
    with served(chat_model(tmp_path / "story", "story", LLAMA_3)) as server:
        enough = threading.Event()
        server.service.writing.submit(enough.wait, 20)  # as a template would hold it up
        chats = [threading.Thread(target=ask, args=(server,)) for ask in (asked, _response, _trace)]
        for chat in chats:
            chat.start()
        try:
            assert server.client.completions.create(model="story", prompt="Once", max_tokens=99, timeout=10).choices
            assert all(chat.is_alive() for chat in chats)
        finally:
            enough.set()
            for chat in chats:
                chat.join(20)


def _response(server: Served) -> None:
    server.client.responses.create(model="story", input="Once", max_output_tokens=2)


def _trace(server: Served) -> None:
    body = {"model": "story", "messages": [{"role": "user", "content": "Once"}]}
    server.client.post("/trace", body=body, cast_to=object)


def test_a_request_sets_variables_of_the_template(tmp_path: Path):
    template = "{% if loud is defined and loud %}{{ 'LOUD ' * 20 }}{% endif %}{{ messages[0].content }}"
    with served(chat_model(tmp_path / "story", "story", template)) as server:

        def n_prompt(**variables: object) -> int:
            extra = {"chat_template_kwargs": variables} if variables else {}
            answer = server.client.chat.completions.create(
                model="story", messages=[{"role": "user", "content": "Once"}], max_tokens=1, extra_body=extra
            )
            assert answer.usage is not None
            return answer.usage.prompt_tokens

        assert n_prompt(loud=True) > n_prompt() == n_prompt(loud=False)
