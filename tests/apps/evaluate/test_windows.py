"""A text in windows, and models that run over them."""

from pathlib import Path

import numpy as np
import pytest
from builders.story_files import rounded, tale, with_context, with_swapped_words, with_tensors
from builders.tiny_models import GGUF_METADATA, gguf_tensors, write_file
from builders.vocabularies import tiny_byte_level
from helpers.refusals import refuses

import llorch
from llorch.apps.evaluate.scores import PairScores, compare_rows, losses
from llorch.apps.evaluate.windows import CONTEXT, Windows, _require_same_ids, cut_text, score, score_pair, text_ids
from llorch.files.tokenizer.gguf_vocabulary import GGUFVocabulary
from llorch.files.tokenizer.tokenizer import Tokenizer
from llorch.ops.numerics import Numerics

BEGINNING = 998  # of story


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> str:
    return tale(monkeypatch, 12)


@pytest.fixture(scope="module")
def story() -> llorch.Model:
    return llorch.load("story")


@pytest.fixture
def coarse(tmp_path: Path) -> llorch.Model:
    return llorch.load(rounded(tmp_path / "coarse.gguf"))


def test_windows_follow_each_other_and_each_starts_with_bos(story: llorch.Model, text: str):
    ids = story.tokenizer.encode(text)
    windows = cut_text([story], text, context=100)
    assert len(windows) == len(ids) // 100 > 10
    for i, window in enumerate(windows):
        assert window.tolist() == [BEGINNING, *ids[100 * i + 1 : 100 * i + 100]]
    np.testing.assert_array_equal(windows.ids, ids)  # making the windows left it alone


def test_a_vocabulary_without_bos_keeps_the_first_token_of_each_window(story: llorch.Model):
    windows = Windows(np.arange(20), None, 6, 3)
    assert [window.tolist() for window in windows] == [[*range(i, i + 6)] for i in (0, 6, 12)]


def test_a_limit_takes_the_first_windows(story: llorch.Model, text: str):
    everything, some = (list(cut_text([story], text, context=50, limit=limit)) for limit in (None, 3))
    np.testing.assert_array_equal(everything[:3], some)
    assert len(list(cut_text([story], text, context=50, limit=10**9))) == len(everything)


def test_the_context_is_512_unless_the_model_holds_less(story: llorch.Model, text: str):
    assert cut_text([story], text).context == CONTEXT == story.config.max_position_embeddings


def test_a_text_of_one_window_is_enough_and_one_token_less_is_not(story: llorch.Model):
    n = len(story.tokenizer.encode("Once upon a time"))
    assert len(cut_text([story], "Once upon a time", context=n)) == 1
    with refuses(ValueError, f"{n + 1} tokens", got=n, where="text"):
        cut_text([story], "Once upon a time", context=n + 1)


@pytest.mark.parametrize("context", [0, 2, 513, 10**12])
def test_a_context_that_the_model_cannot_have_is_refused(story: llorch.Model, text: str, context: int):
    with refuses(ValueError, "3 to 512", got=context, where="story"):
        cut_text([story], text, context=context)


def test_the_model_that_holds_least_sets_the_context(story: llorch.Model, text: str, tmp_path: Path):
    short = llorch.load(with_context(tmp_path / "short.gguf", 64))
    for models in ([story, short], [short, story]):
        assert cut_text(models, text).context == 64
        with refuses(ValueError, "3 to 64", got=65, where="short"):
            cut_text(models, text, context=65)


def test_models_with_vocabularies_of_different_size_are_refused(story: llorch.Model, text: str):
    with refuses(ValueError, "story has 1003", "micro-llama has 401", where="vocabularies"):
        cut_text([story, llorch.load("micro-llama")], text)


def test_models_that_read_a_text_differently_are_refused(story: llorch.Model, tmp_path: Path):
    other = llorch.load(with_swapped_words(tmp_path / "other.gguf", "\u0120fox".encode(), "\u0120bed".encode()))
    bed, fox = story.tokenizer.encode(" bed fox", add_special=False)
    cut_text([story, other], "a cat sat there", context=4)  # reads the same
    with refuses(ValueError, "token 2", f"{fox} for story", f"{bed} for other", where="tokenizers"):
        cut_text([story, other], "a fox sat there", context=4)


def test_ids_that_end_early_are_refused(story: llorch.Model):
    with refuses(ValueError, "token 2", "9 for story", "the end", where="tokenizers"):
        _require_same_ids(story, np.array([5, 7, 9]), story, np.array([5, 7]))


def test_a_model_without_a_vocabulary_is_refused(tmp_path: Path):
    model = llorch.load(write_file(tmp_path / "bare.gguf", gguf_tensors(), GGUF_METADATA))
    with refuses("Missing", where=tmp_path / "bare.gguf"):
        cut_text([model], "Once upon a time")


def test_an_end_token_that_a_vocabulary_adds_is_left_out():
    adds = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = Tokenizer(GGUFVocabulary(tiny_byte_level() | adds, Path("tiny.gguf")))
    assert tokenizer.encode("hell") == [260, 258, 261]
    ids, beginning = text_ids(tokenizer, "hell")
    assert (ids.tolist(), beginning) == ([260, 258], 260)
    assert 261 not in text_ids(tokenizer, "hell<|eot_id|>")[0]  # control tokens in a text stay text
    adds["tokenizer.ggml.add_bos_token"] = False
    ids, beginning = text_ids(Tokenizer(GGUFVocabulary(tiny_byte_level() | adds, Path("tiny.gguf"))), "hell")
    assert (ids.tolist(), beginning) == ([258], None)


@pytest.mark.parametrize("context", [3, 64, 65])
def test_the_second_half_of_each_window_is_scored(story: llorch.Model, text: str, context: int):
    windows = cut_text([story], text, context=context, limit=2)
    first = context // 2  # the row that predicts the first scored token, as in llama-perplexity
    for window, loss in zip(windows, score(story, windows), strict=True):
        logits = story.forward(window)
        assert len(loss) == context - 1 - first
        np.testing.assert_allclose(loss, losses(logits[first:-1], window[first + 1 :]), rtol=1e-4, atol=1e-5)


def test_both_models_are_scored_on_the_same_tokens(story: llorch.Model, coarse: llorch.Model, text: str):
    windows = cut_text([story, coarse], text, context=64, limit=2)
    for window, actual in zip(windows, score_pair(story, coarse, windows), strict=True):
        expected = compare_rows(story.forward(window)[32:-1], coarse.forward(window)[32:-1], window[33:])
        for name in ("reference_loss", "loss", "kl"):
            np.testing.assert_allclose(getattr(actual, name), getattr(expected, name), rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(actual.same_top, expected.same_top)
        assert actual.kl.max() > 0.01


def test_few_rows_of_logits_at_a_time_give_the_same_figures(
    story: llorch.Model, coarse: llorch.Model, text: str, monkeypatch: pytest.MonkeyPatch
):
    windows = cut_text([story, coarse], text, context=65, limit=2)
    whole = PairScores.join(list(score_pair(story, coarse, windows)))
    alone = np.concatenate(list(score(story, windows)))
    np.testing.assert_array_equal(alone, whole.reference_loss, strict=True)
    monkeypatch.setattr("llorch.apps.evaluate.windows._MAX_LOGITS", 5 * story.config.vocab_size)
    parts = PairScores.join(list(score_pair(story, coarse, windows)))
    np.testing.assert_allclose(parts.loss, whole.loss, rtol=1e-4, atol=1e-5, strict=True)
    np.testing.assert_allclose(parts.kl, whole.kl, rtol=1e-4, atol=1e-5, strict=True)


def test_keys_and_values_are_kept_in_the_type_of_the_numerics(story: llorch.Model, text: str):
    half = llorch.load("story", numerics=Numerics("ggml", "f16"))
    windows = cut_text([story, half], text, context=64, limit=1)
    scores = PairScores.join(list(score_pair(story, half, windows)))
    assert 1e-8 < scores.kl.max() < 1e-4
    np.testing.assert_array_equal(np.concatenate(list(score(half, windows))), scores.loss)


def test_a_model_differs_from_a_second_copy_of_itself_by_exactly_nothing(story: llorch.Model, text: str):
    copy = llorch.load("story")
    windows = cut_text([story, copy], text, context=64)
    scores = PairScores.join(list(score_pair(story, copy, windows)))
    assert not scores.kl.any()
    np.testing.assert_array_equal(scores.loss, scores.reference_loss, strict=True)
    assert scores.same_top.all()


def test_infinite_loss_is_refused_by_name_of_the_model(story: llorch.Model, text: str, monkeypatch: pytest.MonkeyPatch):
    right = llorch.Model.forward

    def sure_of_one_token(model: llorch.Model, *arguments, **options) -> np.ndarray:
        logits = right(model, *arguments, **options)
        return np.where(np.arange(logits.shape[-1]) == BEGINNING, logits, -np.inf).astype(logits.dtype)

    windows = cut_text([story], text, context=16, limit=1)
    monkeypatch.setattr(llorch.Model, "forward", sure_of_one_token)
    with refuses(ValueError, expected="finite", got="infinity", where="story"):
        list(score(story, windows))


def test_logits_that_are_not_finite_are_refused_by_name_of_the_model(story: llorch.Model, text: str, tmp_path: Path):
    path = with_tensors(tmp_path / "hot.gguf", lambda name, old: old * (1e38 if name == "output_norm.weight" else 1))
    hot = llorch.load(path)
    windows = cut_text([story, hot], text, context=16, limit=1)
    for run in (score_pair(story, hot, windows), score_pair(hot, story, windows), score(hot, windows)):
        with refuses(ValueError, expected="finite", got="NaN", where="hot"):
            list(run)
