"""The command line as a whole: help pages, exit codes, one line per error, and which stream gets what."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import pytest
from fakes.one_process import resume_in_one_process
from helpers.command_line import REPOSITORY, invoke, words_of
from helpers.refusals import assert_cli_refuses

import llorch
from llorch.apps.bench import measure as bench
from llorch.cli import main
from llorch.cli.tables import console
from llorch.runtime.builtin import EVERY, builtin_path

VERBS = (
    "verify", "diagnose", "diff", "dump-writer", "trace", "learn", "lora", "data", "run", "chat", "serve",
    "inspect", "convert", "tokenize", "quality", "bench", "doctor", "completion",
)  # fmt: skip
GROUPS = ("learn", "lora", "data")
COMMANDS = (
    *(verb for verb in VERBS if verb not in GROUPS),
    *(f"lora {verb}" for verb in ("train", "eval", "merge", "export", "inspect", "doctor", "verify-resume")),
    "data show",
)
LEARN = tuple(
    f"learn {verb}"
    for verb in "watch init list next open check inputs hint solution reset progress trace certificate museum".split()
)


def examples(command: str) -> list[str]:
    """The command lines of a help page, without remarks."""
    lines = invoke(*command.split(), "--help").stdout.partition("\nExamples:\n")[2].partition("\n\n")[0].splitlines()
    return [line.partition(" #")[0].strip() for line in lines]


def test_the_help_page_names_every_built_in_model():
    page = invoke("--help").stdout.partition("or a built-in name:")[2].partition(".\n\n")[0]
    assert page.replace(",", " ").split() == [*EVERY]


def test_llorch_alone_prints_the_help_page_and_ends_well():
    result = invoke()
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: llorch ")
    named = re.findall(r"^  ([a-z][a-z-]*)  +[A-Z]", result.stdout, re.MULTILINE)
    assert named == list(VERBS)


def test_version_names_version_commit_and_extras():
    assert re.fullmatch(
        rf"llorch {llorch.__version__} \(.*commit.*, extras: \w+(, \w+)*\)\n", invoke("--version").stdout
    )


def test_every_verb_of_a_group_is_listed_here():
    groups = {verb: main.get_command(click.Context(main), verb) for verb in ("lora", "data", "learn")}
    listed = [f"{name} {verb}" for name, group in groups.items() for verb in group.list_commands(click.Context(group))]  # type: ignore[union-attr, arg-type]
    assert listed == [command for command in COMMANDS + LEARN if " " in command]


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Mapping[str, int]]]:
    """Few steps, rounds and tokens where an example leaves them open, and no processes; gives the meshes of runs."""
    settings = {"BENCH_ROUNDS": 1, "RUN_MAX_TOKENS": 8}
    settings |= {f"LORA_VERIFY_RESUME_{name}": n for name, n in (("STEPS", 2), ("BATCH_SIZE", 2), ("MAX_LENGTH", 24))}
    for option, value in settings.items():
        monkeypatch.setenv(f"LLORCH_{option}", str(value))
    monkeypatch.setitem(bench.COPY_BYTES, "cpu", 1 << 12)
    monkeypatch.setitem(bench.PRODUCT_WIDTH, "cpu", 16)
    with resume_in_one_process() as started:
        yield started


def run_example(line: str) -> None:
    """Run a command line of a help page, which must end well; one that needs what is not here is left out."""
    if any(other in line for other in ("model.gguf", "path/to", "llamacpp", "--device cuda", "my_llama")):
        return  # they need a file, a folder, an engine or a device
    result = invoke(*words_of(line), stdin="Once upon a time\n" if " | " in line else "")
    assert result.exit_code == 0, (line, result.stderr, result.exception)


@pytest.mark.nightly_cases("lora verify-resume*")  # the next test runs the same examples, with ranks
@pytest.mark.parametrize(
    "verb", [verb for verb in COMMANDS if verb not in ("verify", "serve", "doctor")]
)  # see their own tests, and test_verify_torch and test_learn_verbs
def test_examples_of_the_help_pages_run(verb: str, cheap: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "README.md").write_text("Once upon a time\n")
    monkeypatch.chdir(tmp_path)
    for line in examples(verb):
        run_example(line)
    assert cheap == [{"dp": 2, "tp": 2}] * (3 if verb == "lora verify-resume" else 0)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
def test_examples_of_verify_resume_run_on_ranks_of_a_mesh(monkeypatch: pytest.MonkeyPatch):
    for option, value in (("STEPS", 2), ("BATCH_SIZE", 4), ("MAX_LENGTH", 24)):
        monkeypatch.setenv(f"LLORCH_LORA_VERIFY_RESUME_{option}", str(value))
    for line in examples("lora verify-resume"):
        run_example(line)


def test_help_imports_no_engine_and_no_table_printer():
    modules = "torch, transformers, llama_cpp, rich"
    code = f"import sys; from llorch.cli import main; main(['verify', '--help'], standalone_mode=False); \
print(sorted({{*'{modules}'.split(', ')}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout.endswith("\n[]\n")


def test_options_can_be_set_in_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LLORCH_RUN_MAX_TOKENS", "2")
    assert len(invoke("run", "story", "Once upon a time", "--json").stdout.splitlines()) == 2


def test_a_prompt_longer_than_the_context_is_refused_before_anything_is_printed():
    assert_cli_refuses(invoke("run", "story", "fox " * 700), 2, "forward", 512)


def test_traceback_shows_where_an_error_was_raised():
    result = invoke("--traceback", "run", "story", "x", "-t", "-1")
    assert_cli_refuses(result, 2, traceback=True, where=("sampling", "temperature"), got=-1.0)
    assert result.stderr.splitlines()[-1].startswith("llorch: sampling: ")


def test_a_reader_that_goes_away_is_no_traceback():
    command = [sys.executable, "-m", "llorch", "run", "story", "Once", "-n", "300", "--ignore-eos", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, cwd=REPOSITORY, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == ""


def test_a_line_is_not_broken_for_a_pipe_or_a_narrow_terminal(tmp_path: Path):
    folder = tmp_path / ("deep-" * 30) / ("down-" * 30)
    folder.mkdir(parents=True)
    path = shutil.copy(builtin_path("micro-llama"), folder / "m.gguf")
    assert invoke("inspect", str(path)).stdout.startswith(f"{path}   GGUF")
    out = console()
    out.width = 80
    with out.capture() as captured:
        out.print(f"{path}: a line")
    assert captured.get() == f"{path}: a line\n"
