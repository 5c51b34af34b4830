import numpy as np
import pytest

import llorch
from llorch.model import PREFILL_CHUNK


@pytest.fixture(scope="module")
def model() -> llorch.Model:
    return llorch.load("micro-qwen3")


def test_an_unknown_name_lists_the_built_in_models():
    with pytest.raises(FileNotFoundError, match=r"'nope': no such file or folder.*micro-llama"):
        llorch.load("nope")


@pytest.mark.parametrize("ids", [[-1, 2], [3, 10**6], [3, 2**40]])
def test_an_id_out_of_range_is_named_with_its_index(model: llorch.Model, ids: list[int]):
    wrong = next(i for i in ids if not 0 <= i < model.config.vocab_size)
    with pytest.raises(ValueError, match=rf"token id {wrong} at index {ids.index(wrong)} is outside 0 to"):
        model.forward(ids)


def test_the_number_of_tokens_is_the_first_id_that_is_none(model: llorch.Model):
    n = model.config.vocab_size
    assert model.forward([n - 1]).shape == (1, n)
    with pytest.raises(ValueError, match=f"token id {n} at index 1 is outside 0 to {n - 1}$"):
        model.forward([0, n])


@pytest.mark.parametrize("ids", [np.array([], int), np.array([[1, 2]]), np.array([1.5])])
def test_what_is_no_list_of_ids_is_refused(model: llorch.Model, ids: np.ndarray):
    with pytest.raises(ValueError, match="forward: expected"):
        model.forward(ids)


def test_a_prompt_longer_than_the_context_is_refused_before_any_work(
    model: llorch.Model, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("llorch.model.forward", None)
    too_long = [1] * (model.config.max_position_embeddings + 1)
    with pytest.raises(ValueError, match="do not fit the context of"):
        model.forward(too_long)


def test_positions_beyond_the_context_are_refused(model: llorch.Model):
    with pytest.raises(ValueError, match="do not fit the context"):
        model.forward([1, 2], first_position=model.config.max_position_embeddings - 1)


def test_a_long_prompt_runs_in_chunks_and_gives_the_same_logits(model: llorch.Model):
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, PREFILL_CHUNK + 100)
    trace: dict[str, np.ndarray] = {}
    whole = model.forward(ids, trace=trace)  # a traced run is one pass
    chunked = model.forward(ids)
    assert chunked.shape == (len(ids), model.config.vocab_size)
    np.testing.assert_allclose(chunked, whole, rtol=0, atol=2e-5 * np.abs(whole).max(), strict=True)
    np.testing.assert_array_equal(model.forward(ids, last_only=True), chunked[-1:])


@pytest.mark.parametrize("n_tokens", [3, 4, 5, 8, 11, 12, 13])
def test_chunks_of_any_number_and_size_give_every_row_once(
    model: llorch.Model, monkeypatch: pytest.MonkeyPatch, n_tokens: int
):
    ids = np.random.default_rng(n_tokens).integers(0, model.config.vocab_size, n_tokens)
    whole = model.forward(ids)
    monkeypatch.setattr("llorch.model.PREFILL_CHUNK", 4)
    chunked = model.forward(ids)
    np.testing.assert_allclose(chunked, whole, rtol=0, atol=2e-5 * np.abs(whole).max(), strict=True)
    np.testing.assert_array_equal(model.forward(ids, last_only=True), chunked[-1:], strict=True)


def test_a_traced_run_gives_the_last_row_only_when_asked(model: llorch.Model):
    trace: dict[str, np.ndarray] = {}
    last = model.forward([5, 9, 2, 7], trace=trace, last_only=True)
    assert last.shape == trace["logits"].shape == (1, model.config.vocab_size)
    np.testing.assert_array_equal(last, model.forward([5, 9, 2, 7], last_only=True))


def test_generation_streams_tokens_whose_text_joins_to_the_decoded_ids(model: llorch.Model):
    tokens = list(model.generate("Once", max_tokens=12, ignore_eos=True))
    assert [t.finish for t in tokens] == [None] * 11 + ["length"]
    assert "".join(t.text for t in tokens) == model.tokenizer.decode([t.id for t in tokens], skip_special=False)
    assert all(t.logprob <= 0 for t in tokens)


def test_generation_ends_at_an_end_token_unless_it_is_ignored(model: llorch.Model, monkeypatch: pytest.MonkeyPatch):
    ids = [token.id for token in model.generate("Once", max_tokens=8, ignore_eos=True)]
    first = ids.index(ids[3])
    monkeypatch.setattr(model.tokenizer, "eos_token_ids", frozenset({ids[3]}))
    tokens = list(model.generate("Once", max_tokens=8))
    assert [token.id for token in tokens] == ids[: first + 1]
    assert (tokens[-1].finish, tokens[-1].text) == ("eos", "")
    assert [token.id for token in model.generate("Once", max_tokens=8, ignore_eos=True)] == ids


def test_the_same_seed_gives_the_same_text_and_another_seed_another(model: llorch.Model):
    def text(seed: int) -> list[int]:
        settings = llorch.SamplingSettings(temperature=1.5, seed=seed)
        return [t.id for t in model.generate("Once", max_tokens=12, settings=settings, ignore_eos=True)]

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_generation_ends_where_the_context_ends():
    model = llorch.load("story")
    ids = [1] * (model.config.max_position_embeddings - 3)
    tokens = list(model.generate(ids, max_tokens=100, ignore_eos=True))
    assert len(tokens) == 4  # three more positions, and the token that the last one predicts
    assert tokens[-1].finish == "length"


def test_an_empty_prompt_is_refused(model: llorch.Model):
    with pytest.raises(ValueError, match="at least one token id"):
        list(model.generate([], max_tokens=3))
