"""`llorch tokenize`."""

import json

import pytest
from command_line import invoke

import llorch

TEXT = "The fox\tate caf\u00e9 \U0001f98a."


def test_ids_are_those_of_the_tokenizer():
    found = json.loads(invoke("tokenize", "story", TEXT, "--json").stdout)
    assert found["ids"] == llorch.load("story").tokenizer.encode(TEXT)
    assert [token["id"] for token in found["tokens"]] == found["ids"]


def test_bytes_of_the_pieces_make_the_text():
    tokens = json.loads(invoke("tokenize", "story", TEXT, "--no-special", "--json").stdout)["tokens"]
    assert b"".join(bytes.fromhex(token["bytes"]) for token in tokens).decode() == TEXT


def test_a_piece_that_is_part_of_a_character_has_bytes_and_no_text():
    tokens = json.loads(invoke("tokenize", "story", "\U0001f98a", "--no-special", "--json").stdout)["tokens"]
    assert {token["text"] for token in tokens} == {None}
    assert "b'\\xf0'" in invoke("tokenize", "story", "\U0001f98a").stdout


def test_text_lists_one_id_and_one_quoted_piece_per_line():
    lines = invoke("tokenize", "story", "The fox\n").stdout.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines] == ['"<|begin_of_text|>"', '"The"', '" fox"', '"\\n"']


@pytest.mark.parametrize(("flags", "n_begin"), [([], 1), (["--no-special"], 0), (["--parse-special"], 2)])
def test_the_text_of_a_control_token_stays_text_unless_asked_for(flags: list[str], n_begin: int):
    found = json.loads(invoke("tokenize", "story", "<|begin_of_text|>x", *flags, "--json").stdout)
    assert found["ids"].count(998) == n_begin


def test_text_may_come_from_stdin():
    assert invoke("tokenize", "story", stdin="The fox\n").stdout == invoke("tokenize", "story", "The fox").stdout
