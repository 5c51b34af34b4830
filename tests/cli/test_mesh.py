"""`--mesh` of `llorch run` and `llorch bench`: one voice, one stdin, and what it cannot do in one line."""

import json
import re
from pathlib import Path

import pytest
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses

from llorch.cli.mesh import MeshType
from llorch.cli.options import ENGINES
from llorch.cli.verify import GOLDEN, ReferenceChoice

START = "Once upon a time"


@pytest.mark.slow
def test_a_prompt_on_stdin_is_continued_as_by_one_process(tmp_path: Path):
    from helpers.mesh_programs import invoke_on_mesh

    how = ("run", "-n", "12", "-t", "0.8", "--seed", "7", "--backend", "torch", "--json")
    done = invoke_on_mesh(tmp_path, *how, "--mesh", "tp=2", stdin=START + "\n")
    assert done.exit_code == 0, done.stderr
    texts = done.stdout, invoke(*how, stdin=START).stdout
    ids, alone = ([json.loads(line)["id"] for line in text.splitlines()] for text in texts)
    assert ids == alone


@pytest.mark.slow
def test_speeds_are_those_of_all_ranks(tmp_path: Path):
    from helpers.mesh_programs import invoke_on_mesh

    how = ("--prompt", "5", "--decode", "2", "--rounds", "1", "--json")
    done = invoke_on_mesh(tmp_path, "bench", "--mesh", "tp=2", *how)
    assert done.exit_code == 0, done.stderr
    made = json.loads(done.stdout)
    assert (made["model"], made["backend"]) == ("story", "torch-cpu-float32-tp2")
    assert made["decode"]["bytes_per_step"] > 0


def test_without_a_prompt_all_ranks_end_at_once(tmp_path: Path):
    from helpers.mesh_programs import invoke_on_mesh

    result = invoke_on_mesh(tmp_path, "run", "--mesh", "tp=2")
    assert_cli_refuses(result, 2, "argument", "stdin")
    assert result.stderr.count("Error: ") == 1


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (("run", "story", START, "--mesh", "dp=2,tp=2"), "--mesh dp=2"),
        (("run", "story", START, "--mesh", "tp=2", "--device", "cuda"), "--device"),
        (("run", "story", START, "--mesh", "tp=2", "--compile"), "--compile"),
        (("run", "story", START, "--mesh", "tp=2", "--adapter", "x"), "--adapter"),
        (("run", "story", START, "--mesh", "tp=2", "--numerics", "ggml"), "--backend numpy"),
        (("bench", "--mesh", "tp=2", "--shape", "llama-2-7b"), "--shape"),
        (("bench", "--mesh", "dp=2"), "--mesh dp=2"),
    ],
)
def test_unsupported_mesh_run_is_refused_before_ranks_are_started(arguments: tuple[str, ...], fact: str):
    assert_cli_refuses(invoke(*arguments), 2, fact)


@pytest.mark.parametrize("text", ["DP=2,TP=3", "dp=2,tp=3", "tP=3,Dp=2"])
def test_mesh_is_read_in_any_case(text: str):
    assert MeshType().convert(text, None, None) == {"dp": 2, "tp": 3}


def spelled(option: str) -> str:
    """The values of an option as the help page writes them."""
    (text,) = re.findall(rf"^  {option}\s+(\S+)", invoke("verify", "--help").stdout, re.MULTILINE)
    return text


def test_values_are_read_as_the_help_page_spells_them():
    sizes = spelled("--mesh").replace("N", "2").replace("M", "3")
    assert MeshType().convert(sizes, None, None) == {"dp": 2, "tp": 3}
    *words, _ = spelled("--against").strip("[]").split("|")
    assert [ReferenceChoice().convert(word, None, None) for word in words] == [GOLDEN, *ENGINES]
