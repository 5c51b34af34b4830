"""`/v1/completions` as the real `openai` client sees it."""

from typing import Any

import httpx2 as httpx
import openai
import pytest
from helpers.served import Served

from llorch.apps.serve.engine import Work
from llorch.apps.serve.replies import timings, usage
from llorch.model.generate import Answer, IdsOnly, Job
from llorch.model.model import Model
from llorch.ops.sampling import SamplingSettings

START = "Once upon a time"


def create(server: Served, **asked: Any) -> Any:
    wanted: dict[str, Any] = {"model": "story", "prompt": START, "temperature": 0} | asked
    return server.client.completions.create(**wanted)


def text(model: Model, prompt, **options) -> str:
    return "".join(token.text for token in model.generate(prompt, **options))


def test_an_answer_is_that_of_generate_and_has_16_tokens_unless_told(server: Served, story: Model):
    actual = create(server)
    assert (actual.choices[0].text, actual.choices[0].finish_reason) == (text(story, START, max_tokens=16), "length")
    assert (actual.usage.prompt_tokens, actual.usage.completion_tokens) == (5, 16)
    assert actual.timings["prompt_n"] == 5


def test_a_prompt_may_be_ids(server: Served, story: Model):
    ids = story.tokenizer.encode(START)
    assert create(server, prompt=ids).choices[0].text == text(story, START, max_tokens=16)


def test_several_prompts_have_n_answers_each_in_their_order(server: Served, story: Model):
    prompts = [START, "The little fox"]
    ids = [story.tokenizer.encode(prompt) for prompt in prompts]
    wanted = [
        text(story, prompt, max_tokens=8, settings=SamplingSettings(temperature=1.3, seed=seed))
        for prompt in prompts
        for seed in (5, 6)
    ]
    for prompt in (prompts, ids):
        actual = create(server, prompt=prompt, n=2, seed=5, temperature=1.3, max_tokens=8)
        assert [choice.text for choice in actual.choices] == wanted
        assert actual.usage.prompt_tokens == sum(map(len, ids))


def test_a_stream_has_the_same_text_and_the_counts(server: Served, story: Model):
    chunks = list(create(server, stream=True, stream_options={"include_usage": True}))
    assert "".join(one.choices[0].text for one in chunks[:-1]) == text(story, START, max_tokens=16)
    assert [one.choices[0].finish_reason for one in chunks[:-1]][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 16


def test_log_probabilities_in_the_older_form(server: Served, story: Model):
    actual = create(server, logprobs=2, max_tokens=6).choices[0]
    tokens = list(story.generate(START, max_tokens=6))
    assert actual.logprobs.token_logprobs == [token.logprob for token in tokens]
    assert "".join(actual.logprobs.tokens) == actual.text
    assert actual.logprobs.text_offset == [len("".join(actual.logprobs.tokens[:n])) for n in range(6)]
    assert all(len(top) == 2 and max(top.values()) == own for top, own in zip(
        actual.logprobs.top_logprobs, actual.logprobs.token_logprobs, strict=True))  # fmt: skip
    chunks = list(create(server, logprobs=2, max_tokens=6, stream=True))
    assert [offset for one in chunks for offset in one.choices[0].logprobs.text_offset] == actual.logprobs.text_offset


def test_top_logprobs_of_tokens_without_own_text_have_distinct_keys(server: Served, monkeypatch: pytest.MonkeyPatch):
    pieces = (b"\xf0\x9f", b"\xe2\x80", b"a", b"")  # some tokens share one, as byte tokens and letters do in real files
    monkeypatch.setattr(server.service.model.tokenizer, "token_bytes", lambda token_id: pieces[token_id % 4])
    actual = create(server, logprobs=20, max_tokens=4).choices[0].logprobs
    for token, logprob, top in zip(actual.tokens, actual.token_logprobs, actual.top_logprobs, strict=True):
        assert len(top) == 20
        assert top[token] == logprob == max(top.values())
        assert token in (r"bytes:\xf0\x9f", r"bytes:\xe2\x80", "a", "")
        others = {key for key in top if key.startswith("token_id:")}
        assert {*top} - others <= {r"bytes:\xf0\x9f", r"bytes:\xe2\x80", "a", ""}


@pytest.mark.nightly_cases("/v1/completions")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/trace"])
def test_a_raw_prompt_holds_control_tokens_unless_told_otherwise(server: Served, story: Model, path: str):
    prompt = "".join(f"{control}hi" for control in sorted(story.tokenizer.control_texts))
    wanted = {parsed: story.tokenizer.encode(prompt, parse_special=parsed) for parsed in (True, False)}
    # behind the one that begins every text
    n_controls = {parsed: sum(one in story.tokenizer.control_ids for one in ids[1:]) for parsed, ids in wanted.items()}
    assert n_controls == {True: len(story.tokenizer.control_texts), False: 0}
    for how in ({}, {"parse_special": True}, {"parse_special": False}):
        actual = httpx.post(server.url + path, json={"model": "story", "prompt": prompt, **how}, trust_env=False).json()
        n_prompt = len(actual["tokens"]) if path == "/v1/trace" else actual["usage"]["prompt_tokens"]
        assert n_prompt == len(wanted[how.get("parse_special", True)]), how


def test_a_raw_prompt_may_do_without_what_the_tokenizer_adds(server: Served, story: Model):
    actual = create(server, max_tokens=1, extra_body={"add_special_tokens": False})
    assert actual.usage.prompt_tokens == len(story.tokenizer.encode(START, add_special=False)) == 4


def test_ids_beyond_the_context_are_refused(server: Served):
    with pytest.raises(openai.BadRequestError) as caught:
        create(server, prompt=[5] * 600)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


N_PROMPT = 8


def answer(n_cached: int, n_made: int, joined: float, first: float, last: float) -> Work:
    """One answer to a prompt of `N_PROMPT` tokens; the seconds are those of the engine's clock."""
    job = Job([*range(N_PROMPT)], n_made, SamplingSettings(), frozenset())
    made = Answer(IdsOnly(), end_ids=frozenset(), max_tokens=n_made)
    return Work(job, made, lambda event: None, 0.0, joined, first, last, n_cached, n_made)


WORKS = answer(6, 5, 1.0, 2.0, 4.0), answer(0, 9, 1.5, 3.0, 5.0)


def test_a_prompt_of_two_answers_is_counted_once_with_the_most_tokens_that_were_cached():
    found = usage(WORKS, n_prompt=N_PROMPT)
    assert (found.prompt_tokens, found.completion_tokens, found.total_tokens) == (8, 14, 22)
    assert found.prompt_tokens_details.cached_tokens == 6


def test_cached_tokens_are_not_read_and_the_first_token_of_an_answer_is_no_step():
    found = timings(WORKS)
    assert (found.cache_n, found.prompt_n, found.predicted_n) == (6, 10, 14)
    assert (found.prompt_ms, found.prompt_per_second) == (2000, 5)  # from the first that joined to the last first token
    assert (found.predicted_ms, found.predicted_per_second) == (2000, 6)
