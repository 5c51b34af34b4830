"""`llorch tokenize`."""

import json

import pytest
from click.testing import CliRunner
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses, assert_tells

import llorch
from llorch.cli import main

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


@pytest.mark.nightly_cases("chat-ascii", "chat-latin-1", "chat-utf-8")
@pytest.mark.parametrize("charset", ["utf-8", "latin-1", "ascii"])  # as the locale may say
@pytest.mark.parametrize("verb", ["run", "chat", "tokenize"])
def test_a_byte_on_stdin_that_is_not_utf8_is_named_with_its_offset_in_every_locale(verb: str, charset: str):
    result = CliRunner(charset=charset).invoke(main, [verb, "story"], input=b"caf\xc3\xa9\n \xe9")
    assert (result.exit_code, "Traceback" in result.stderr) == (2, False)
    assert_tells(result.stderr.splitlines()[-1], got=("0xe9", "offset 7"), where="stdin")


def test_text_on_stdin_is_utf8_whatever_the_locale_says():
    result = CliRunner(charset="latin-1").invoke(main, ["tokenize", "story", "--json"], input=b"caf\xc3\xa9\r\n!\n")
    assert json.loads(result.stdout)["ids"] == llorch.load("story").tokenizer.encode("caf\u00e9\n!")


@pytest.mark.parametrize(
    "words",
    [
        ("tokenize", "story", "{}"), ("run", "story", "{}"), ("run", "story", "x", "--stop", "{}"),
        ("run", "story", "--chat", "{}"), ("run", "story", "--chat", "x", "--system", "{}"),
        ("chat", "story", "--system", "{}"), ("trace", "story", "{}", "-o", "t.npz"),
        ("verify", "story", "--prompt", "{}"), ("diagnose", "dump", "--model", "story", "--prompt", "{}"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_byte_of_an_argument_that_is_not_utf8_is_named_with_its_offset(words: tuple[str, ...]):
    result = invoke(*(word.replace("{}", "caf\udce9") for word in words))
    assert_cli_refuses(result, 2, got=("0xe9", "offset 3"))


def test_stdin_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.cli.inputs.MOST_STDIN", 1000)
    assert invoke("tokenize", "story", stdin="x" * 1000).exit_code == 0
    assert_cli_refuses(invoke("tokenize", "story", stdin="x" * 1001), 2, 1000, where="stdin")
