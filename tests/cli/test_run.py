"""`llorch run`."""

import json
import subprocess
import sys

from command_line import REPOSITORY, invoke, spawn

START = "Once upon a time"


def test_the_text_is_that_of_the_python_interface():
    import llorch

    text = "".join(token.text for token in llorch.load("story").generate(START, max_tokens=12))
    assert invoke("run", "story", START, "-n", "12").stdout == text + "\n"


def test_a_prompt_on_stdin_loses_only_its_last_line_end():
    by_argument = invoke("run", "story", START, "-n", "8").stdout
    assert invoke("run", "-n", "8", stdin=START + "\n").stdout == by_argument
    assert (
        invoke("run", "-n", "8", stdin=START + "\n\n").stdout == invoke("run", "story", START + "\n", "-n", "8").stdout
    )


def test_stdin_is_left_to_the_caller_where_there_is_a_prompt():
    loop = f"printf 'one\\ntwo\\n' | while read line; do {sys.executable} -m llorch run story \"$line\" -n 1; done"
    done = subprocess.run(["sh", "-c", loop], capture_output=True, check=True, cwd=REPOSITORY, text=True)
    assert len(done.stdout.splitlines()) == 2
    assert invoke("run", "story", "-", "-n", "8", stdin=START).stdout == invoke("run", "story", START, "-n", "8").stdout


def test_json_is_one_line_per_token_and_the_last_says_why():
    tokens = [json.loads(line) for line in invoke("run", "story", START, "-n", "6", "--json").stdout.splitlines()]
    assert [token["finish"] for token in tokens] == [None] * 5 + ["length"]
    assert all(token.keys() == {"id", "text", "logprob", "finish"} and token["logprob"] <= 0 for token in tokens)
    assert "".join(token["text"] for token in tokens) + "\n" == invoke("run", "story", START, "-n", "6").stdout


def test_the_same_seed_draws_the_same_text_and_another_seed_another():
    def text(seed: str) -> str:
        return invoke("run", "story", START, "-n", "20", "-t", "1.5", "--seed", seed).stdout

    assert text("3") == text("3") != text("4")


def test_text_ends_before_a_stop_string():
    whole = invoke("run", "story", START, "-n", "30").stdout
    assert "." in whole
    stopped = invoke("run", "story", START, "-n", "30", "--stop", "nowhere", "--stop", ".").stdout
    assert stopped == whole[: whole.index(".")] + "\n"


def test_filters_without_a_temperature_are_remarked_upon():
    result = invoke("run", "story", START, "-n", "2", "--top-k", "5")
    assert "change nothing at temperature 0" in result.stderr
    assert invoke("run", "story", START, "-n", "2", "--top-k", "5", "-t", "1").stderr == ""


def test_a_full_context_is_remarked_upon():
    result = invoke("run", "story", "fox " * 500, "-n", "100", "--ignore-eos")
    assert result.exit_code == 0
    assert "the context of 512 tokens is full" in result.stderr


def test_verbose_tells_the_rates():
    result = invoke("run", "story", START, "-n", "3", "-v")
    assert "story: prompt 5 tokens in" in result.stderr
    assert "; 2 more tokens in" in result.stderr
    assert "end: length" in result.stderr


def test_text_that_is_not_utf8_is_refused_in_one_line():
    done = spawn("tokenize", "story", "caf\udce9")
    assert done.returncode == 2
    assert done.stderr.startswith("llorch: ")
    assert "Traceback" not in done.stderr


def test_an_empty_name_is_no_model():
    result = invoke("run", "", START)
    assert result.exit_code == 3
    assert "model '': no such file" in result.stderr


def test_a_prompt_without_a_model_is_named_as_an_unknown_model():
    result = invoke("run", START)
    assert result.exit_code == 3
    assert f"model {START!r}: no such file or folder" in result.stderr
