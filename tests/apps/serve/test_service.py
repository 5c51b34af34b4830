"""The limits that the server sets before the engine sees a request."""

from typing import Any

import pytest

from llorch.ops.sampling import SamplingSettings

pytest.importorskip("starlette", reason="NOT RUN: starlette is not installed")

CONTEXT = 64  # below that of the model, so that the server alone cuts an answer


@pytest.fixture(scope="module")
def service() -> Any:
    from llorch.apps.serve.engine import Engine
    from llorch.apps.serve.scheduler import Turns
    from llorch.apps.serve.service import Service
    from llorch.model.model import load

    model = load("story")
    assert model.config.max_position_embeddings > CONTEXT
    return Service(model, Engine(Turns(model, n_jobs=1), n_jobs=1), context=CONTEXT, timeout=60, version="1")


def room(service, n_prompt: int, max_tokens: int | None) -> int:
    return service.job(
        [5] * n_prompt, SamplingSettings(), param="prompt", max_tokens=max_tokens, adapter=None
    ).max_tokens


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "expected"),
    [
        (CONTEXT - 4, None, 5),  # the last token of an answer is never fed back
        (CONTEXT - 4, 6, 5),
        (CONTEXT - 4, 5, 5),
        (CONTEXT - 4, 4, 4),
        (CONTEXT, None, 1),
        (1, 1000, CONTEXT),
    ],
)
def test_prompt_and_answer_fill_the_context_and_no_more(service, n_prompt: int, max_tokens: int | None, expected: int):
    assert room(service, n_prompt, max_tokens) == expected


def test_a_prompt_of_one_token_more_than_the_context_is_refused(service):
    from llorch.apps.serve.api_errors import ApiError

    with pytest.raises(ApiError) as caught:
        room(service, CONTEXT + 1, 1)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "context_length_exceeded", "prompt")


@pytest.mark.parametrize("texts", [["x" * 10], ["x" * 4, "y" * 6], ["é" * 5], ["é" * 4, "yy"]])
def test_bytes_of_all_texts_of_a_request_are_added_up(monkeypatch: pytest.MonkeyPatch, texts: list[str]):
    from llorch.apps.serve import service
    from llorch.apps.serve.api_errors import ApiError

    monkeypatch.setattr(service, "MAX_TEXT", 10)
    service.require_short(*texts, param="messages")
    with pytest.raises(ApiError) as caught:
        service.require_short(*texts, "z", param="messages")
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
