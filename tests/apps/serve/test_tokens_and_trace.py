"""`/tokenize`, `/detokenize` and `/v1/trace`."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from builders.quantised_copies import quantised_copy
from builders.random_adapters import random_adapter
from helpers.served import Served, served

from llorch.files.convert import convert
from llorch.model.model import Model, load

START = "Once upon a time"


@pytest.fixture(scope="module")
def story() -> Model:
    model = load("story")
    model.add_adapter("pirate", random_adapter(model.config))
    return model


@pytest.fixture(scope="module")
def server(story: Model) -> Iterator[Served]:
    with served(story) as running:
        yield running


def post(server: Served, path: str, **body: Any) -> Any:
    answer = httpx.post(server.url + path, json=body, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(server: Served, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(server.url + path, json=body, trust_env=False)
    assert answer.status_code == 400
    return answer.json()["error"]


def test_ids_are_those_of_the_tokenizer_and_lead_back_to_the_text(server: Served, story: Model):
    ids = post(server, "/tokenize", content=START)["tokens"]
    assert ids == story.tokenizer.encode(START, add_special=False)
    assert post(server, "/tokenize", content=START, add_special=True)["tokens"] == story.tokenizer.encode(START)
    assert post(server, "/detokenize", tokens=ids)["content"] == START


def test_fields_that_would_change_the_tokens_are_refused_and_others_are_named(server: Served):
    error = refused(server, "/tokenize", content=START, add_special_tokens=True)
    assert (error["param"], error["code"]) == ("add_special_tokens", "unsupported")
    error = refused(server, "/detokenize", tokens=[1], skip_special_tokens=False)
    assert (error["param"], error["code"]) == ("skip_special_tokens", "unsupported")
    body = {"content": START, "model": "story", "foo": 1}
    answer = httpx.post(f"{server.url}/tokenize", json=body, trust_env=False)
    assert (answer.status_code, answer.headers["x-llorch-ignored"]) == (200, "model, foo")


def test_pieces_are_texts_or_else_bytes(server: Served):
    tokens = post(server, "/tokenize", content="Hé", with_pieces=True)["tokens"]
    data = b"".join(one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"]) for one in tokens)
    assert data == "Hé".encode()
    assert any(isinstance(one["piece"], list) for one in tokens)


def test_control_tokens_are_only_made_where_they_are_asked_for(server: Served, story: Model):
    text = min(story.tokenizer.control_texts)
    assert len(post(server, "/tokenize", content=text)["tokens"]) > 1
    (one,) = post(server, "/tokenize", content=text, parse_special=True)["tokens"]
    assert one in story.tokenizer.control_ids
    assert post(server, "/detokenize", tokens=[one])["content"] == text


def test_a_trace_has_every_stage_and_the_arrays_that_were_asked_for(server: Served, story: Model):
    actual = post(server, "/v1/trace", model="story", prompt=START, arrays=["l0.q_rope", "logits"])
    wanted: dict[str, np.ndarray] = {}
    story.forward(actual["tokens"], trace=wanted)
    assert actual["tokens"] == story.tokenizer.encode(START)
    assert [stage["name"] for stage in actual["stages"]] == list(wanted)
    for stage in actual["stages"]:
        array = wanted[stage["name"]].astype(np.float64)
        finite = array[np.isfinite(array)]
        assert (stage["shape"], stage["n_not_finite"]) == ([*array.shape], array.size - finite.size)
        figures = [finite.min(), finite.max(), finite.mean(), np.sqrt((finite**2).mean())]
        np.testing.assert_allclose([stage[key] for key in ("min", "max", "mean", "rms")], figures, rtol=1e-12)
    arrays = {name: np.load(io.BytesIO(base64.b64decode(text))) for name, text in actual["arrays"].items()}
    assert arrays.keys() == {"l0.q_rope", "logits"}
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, wanted[name], strict=True)


def test_a_trace_of_ids_of_a_conversation_and_of_an_adapter(server: Served, story: Model):
    ids = story.tokenizer.encode(START)
    base = post(server, "/v1/trace", model="story", tokens=ids)
    assert post(server, "/v1/trace", model="story", messages=[{"role": "user", "content": START}]) == base
    adapted = post(server, "/v1/trace", model="story:pirate", tokens=ids)
    assert adapted["stages"][0] == base["stages"][0]
    assert adapted["stages"][-1] != base["stages"][-1]


def test_a_trace_is_bounded(server: Served):
    assert refused(server, "/v1/trace", model="story", tokens=[5] * 513)["code"] == "context_length_exceeded"
    assert refused(server, "/v1/trace", model="story", tokens=[5], arrays=["embed", "l9.q"])["param"] == "arrays.1"
    names = [f"l{i}.{part}" for i in range(5) for part in ("attn_scores", "attn_probs")]
    error = refused(server, "/v1/trace", model="story", tokens=[5] * 512, arrays=names)
    assert error["param"] == "arrays"


def test_an_adapter_is_a_model_of_its_own(server: Served, story: Model, tmp_path: Path):
    assert [one.id for one in server.client.models.list()] == ["story", "story:pirate"]
    actual = server.client.chat.completions.create(
        model="story:pirate", messages=[{"role": "user", "content": START}], max_tokens=8, temperature=0
    )
    wanted = "".join(token.text for token in story.generate(START, max_tokens=8, adapter="pirate"))
    assert actual.choices[0].message.content == wanted
    assert wanted != "".join(token.text for token in story.generate(START, max_tokens=8))


def test_trace_of_a_quantised_folder_has_the_logits_of_its_decoded_copy(tmp_path: Path):
    folder, decoded = quantised_copy("story", tmp_path / "copy"), tmp_path / "decoded"
    convert(folder, decoded)
    with served(load(folder)) as running:
        name = httpx.get(f"{running.url}/v1/models", trust_env=False).json()["data"][0]["id"]
        actual = post(running, "/v1/trace", model=name, prompt=START, arrays=["logits"])
        answer = post(running, "/v1/completions", model=name, prompt=START, temperature=0, max_tokens=6)
    logits = np.load(io.BytesIO(base64.b64decode(actual["arrays"]["logits"])))
    wanted = load(decoded)
    np.testing.assert_allclose(logits, wanted.forward(actual["tokens"]), rtol=1e-5, atol=1e-5)
    assert np.abs(logits - load("story").forward(actual["tokens"])).max() > 1e-3
    tokens = wanted.generate(START, max_tokens=6)
    assert answer["choices"][0]["text"] == "".join(token.text for token in tokens)
