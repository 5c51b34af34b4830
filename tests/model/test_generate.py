"""Generation: text that is handed out when it is certain, and never before."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from helpers.refusals import refuses

from llorch.model.generate import Answer, TextBuffer, Token, log_probability, sample_ids, stream
from llorch.ops.sampling import SamplingSettings

END, OTHER_END = 900, 901
GREEDY = SamplingSettings()


class ByteTokenizer:
    """Token n is the byte n; tokens from 256 are whole words, or nothing for end tokens."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in (END, OTHER_END):
            return b""
        return bytes([token_id]) if token_id < 256 else self._words[token_id - 256].encode()


def run(ids: Sequence[int], *words: str, stop: Sequence[str] = (), max_tokens: int | None = None) -> list[Token]:
    def sampled() -> Iterator[tuple[int, float]]:
        for n, token_id in enumerate(ids):
            yield token_id, -float(n)
        raise AssertionError("went on after the last token")

    most = len(ids) if max_tokens is None else max_tokens
    ends = frozenset({END, OTHER_END})
    return list(stream(sampled(), Answer(ByteTokenizer(*words), end_ids=ends, stop=stop, max_tokens=most)))


def texts(tokens: list[Token]) -> list[str]:
    return [token.text for token in tokens]


def test_tokens_carry_id_text_logprob_and_finish():
    assert run(list(b"abc")) == [Token(97, "a", -0.0, None), Token(98, "b", -1.0, None), Token(99, "c", -2.0, "length")]


@pytest.mark.parametrize("character", ["é", "€", "😀"])
def test_a_character_is_held_back_until_its_last_byte(character):
    data = character.encode()
    assert texts(run([*data, 33], max_tokens=len(data) + 1)) == [""] * (len(data) - 1) + [character, "!"]


EURO = list("€".encode())


@pytest.mark.parametrize(
    ("ids", "word", "stop", "expected", "finish"),
    [
        ([EURO[0], 256, *EURO[1:], 256, 33], "", "!?", ["", "", "", "€", "", "!"], "length"),  # nothing between bytes
        ([97, *EURO[:-1]], "", None, ["a", "", "\ufffd"], "length"),  # an incomplete character is replaced once
        ([*EURO[:-1], END], "", None, ["", "", "\ufffd"], "eos"),
        ([0xFF, 97, 0xE2, 98], "", None, ["\ufffd", "a", "", "\ufffdb"], "length"),  # what is no text
        ([*b"ab#", END], "", "##", ["a", "b", "", "#"], "eos"),  # what was held back is handed out
        (b"a#", "", "##", ["a", "#"], "length"),
        (b"one STOP", "", "STOP", ["o", "n", "e", " ", "", "", "", ""], "stop"),
        ([97, 256], "b END c", " END", ["a", "b"], "stop"),  # inside of a token
        (b"a##b", "", "###", ["a", "", "", "##b"], "length"),  # only begun
        (b"aabaac", "", "aabaad", ["", "", "", "", "", "aabaac"], "length"),  # the longest beginning is held back
        (b"aaab", "", "aab", ["", "", "a", ""], "stop"),
        ([256], "x two one", "one,two", ["x "], "stop"),  # the first in the text wins
        ("a→".encode(), "", "→", ["a", "", "", ""], "stop"),
        (b"a##", "", "##", ["a", "", ""], "stop"),  # completed by the last token
    ],
)
def test_text_is_handed_out_when_it_is_certain(ids, word, stop, expected, finish):
    most = len(ids) if finish == "length" or stop == "##" else 99
    actual = run(list(ids), word, stop=stop.split(",") if stop else [], max_tokens=most)
    assert texts(actual) == expected
    assert [token.finish for token in actual] == [None] * (len(expected) - 1) + [finish]


@pytest.mark.parametrize("end", [END, OTHER_END])
def test_every_end_token_ends_the_text_and_has_none_itself(end):
    assert run([97, end], max_tokens=10) == [Token(97, "a", -0.0, None), Token(end, "", -1.0, "eos")]


def test_without_end_ids_an_end_token_is_an_empty_token():
    actual = list(stream(iter([(END, 0.0), (97, 0.0)]), Answer(ByteTokenizer(), end_ids=frozenset(), max_tokens=2)))
    assert [(token.text, token.finish) for token in actual] == [("", None), ("a", "length")]


@pytest.mark.parametrize("length", [17, 40, 300])
def test_a_long_stop_string_across_tokens_is_never_handed_out(length):
    stop = "".join(chr(97 + place % 26) for place in range(length))
    actual = run(list(b"> " + stop.encode()), stop=[stop], max_tokens=999)
    assert texts(actual) == [">", " "] + [""] * length
    assert actual[-1].finish == "stop"
    assert "".join(texts(run(list(stop[:-1].encode()), stop=[stop]))) == stop[:-1]


@pytest.mark.parametrize("stop", [(), ["no"], ["é!", "x"]])
def test_no_text_is_lost_or_doubled(rng, stop):
    data = "née ön noé!? 😀".encode() + bytes(rng.integers(0, 256, size=40).tolist())
    before_stop = min((data.decode(errors="replace").find(s) for s in stop if s in data.decode(errors="replace")),
                      default=None)  # fmt: skip
    assert "".join(texts(run(list(data), stop=stop))) == data.decode(errors="replace")[:before_stop]


def test_no_tokens_wanted_means_none():
    assert list(stream(iter([]), Answer(ByteTokenizer(), end_ids=frozenset(), max_tokens=0))) == []


def test_stop_strings_that_cannot_be_meant_are_refused():
    with refuses(ValueError, "stop", got="''", where="generate"):
        TextBuffer(["a", ""])
    with refuses(ValueError, "stop", expected="list", got="'##'", where="generate"):
        TextBuffer("##")


def test_log_probability_matches_shares_worked_by_hand():
    logits = np.log(np.array([1.0, 3.0, 4.0])).astype(np.float32)
    assert log_probability(logits, 1) == pytest.approx(math.log(3 / 8), abs=1e-7)
    assert log_probability(np.array([-300.0, 300.0], np.float32), 0) == pytest.approx(-600)


class Script:
    """A model that wants token n after n tokens, with logits 0 and 2, and remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, new: Sequence[int]) -> np.ndarray:
        self.calls.append(list(new))
        logits = np.zeros(8, np.float32)
        logits[sum(map(len, self.calls)) % 8] = 2
        return logits


def test_the_prompt_is_fed_once_and_then_every_drawn_token():
    script = Script()
    assert [token_id for token_id, _ in sample_ids(script, [7, 7, 7], GREEDY, max_tokens=4)] == [3, 4, 5, 6]
    assert script.calls == [[7, 7, 7], [3], [4], [5]]  # the last token is not run


def test_logprob_is_that_of_the_model_before_any_filter():
    settings = SamplingSettings(temperature=0.1, top_k=1, repetition_penalty=5.0)
    (_, logprob), *_ = sample_ids(Script(), [7], settings, max_tokens=1)
    assert logprob == pytest.approx(2 - math.log(7 + math.e**2))


def test_the_penalty_looks_at_prompt_and_drawn_tokens():
    def step(new: Sequence[int]) -> np.ndarray:
        return np.array([3.0, 2.9, 2.8, 2.7])

    assert [i for i, _ in sample_ids(step, [0], SamplingSettings(repetition_penalty=2.0), max_tokens=4)] == [1, 2, 3, 0]


def test_a_seed_repeats_its_draws_and_another_does_not():
    def step(new: Sequence[int]) -> np.ndarray:
        return np.zeros(1000)

    def ids(seed: int) -> list[int]:
        return [i for i, _ in sample_ids(step, [0], SamplingSettings(temperature=1.0, seed=seed), max_tokens=20)]

    assert ids(1) == ids(1)
    assert ids(1) != ids(2)
    assert len(set(ids(1))) > 10
