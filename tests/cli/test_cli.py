"""The command line as a whole: help pages, exit codes, one line per error, and which stream gets what."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from command_line import REPOSITORY, invoke, spawn

import llorch
from llorch.builtin import EVERY, builtin_path
from llorch.cli import main
from llorch.cli.tables import console

VERBS = (
    "run", "verify", "diagnose", "diff", "dump-writer", "inspect", "tokenize", "trace", "convert", "quality", "bench",
    "serve", "chat", "atlas", "doctor", "completion", "lora", "data", "learn",
)  # fmt: skip
COMMANDS = (
    *VERBS[:-3],
    *(f"lora {verb}" for verb in ("train", "eval", "merge", "export", "inspect", "doctor", "verify-resume")),
    "data show",
)
LEARN = tuple(
    f"learn {verb}"
    for verb in "watch init check inputs next hint list solution reset progress certificate museum".split()
)


def examples(command: str) -> list[str]:
    """The command lines that open a help page, without the remarks beside them."""
    page = invoke(*command.split(), "--help").stdout.split("\n\n")
    return [line.strip().split("   ")[0] for line in page[1].splitlines()]


def test_the_help_page_names_every_built_in_model():
    page = invoke("--help").stdout.partition("or a built-in name:")[2].partition(".\n\n")[0]
    assert page.replace(",", " ").split() == [*EVERY]


def test_llorch_alone_prints_the_help_page_and_ends_well():
    result = invoke()
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: llorch ")
    assert [line.split()[0] for line in result.stdout.split("Commands:\n")[1].splitlines()] == list(VERBS)


def test_version_is_the_version_of_the_package():
    assert invoke("--version").stdout == f"llorch {llorch.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS + LEARN)
def test_help_starts_with_examples_that_name_the_verb(command: str):
    lines = examples(command)
    assert len(lines) >= 3
    assert all(f"llorch {command.removesuffix(' watch')}" in line for line in lines)  # that one goes without saying


def test_every_verb_of_a_group_is_listed_here():
    groups = {verb: main.get_command(click.Context(main), verb) for verb in ("lora", "data", "learn")}
    listed = [f"{name} {verb}" for name, group in groups.items() for verb in group.list_commands(click.Context(group))]  # type: ignore[union-attr, arg-type]
    assert listed == [command for command in COMMANDS + LEARN if " " in command]


@pytest.mark.parametrize(
    "verb", [verb for verb in COMMANDS if verb not in ("verify", "serve", "atlas", "doctor")]
)  # see their own tests, and test_verify_torch and test_learn_verbs
def test_examples_of_the_help_pages_run(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "README.md").write_text("Once upon a time\n")
    monkeypatch.chdir(tmp_path)
    for line in examples(verb):
        if any(other in line for other in ("model.gguf", "path/to", "llamacpp", "--device cuda", "my_llama")):
            continue  # they need a file, a folder, an engine or a device
        stdin, _, command = line.rpartition(" | ")
        words = shlex.split(command)
        result = invoke(*words[1:], stdin="Once upon a time\n" if stdin else "")
        assert result.exit_code == 0, (line, result.stderr, result.exception)


@pytest.mark.parametrize("name", COMMANDS + LEARN)
def test_every_option_has_a_help_text(name: str):
    command: click.Command | None = main
    for word in name.split():
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word)
    assert command is not None
    assert [p.name for p in command.params if isinstance(p, click.Option) and not p.help] == []


def test_help_imports_no_engine_and_no_table_printer():
    modules = "torch, transformers, llama_cpp, rich"
    code = f"import sys; from llorch.cli import main; main(['verify', '--help'], standalone_mode=False); \
print(sorted({{*'{modules}'.split(', ')}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout.endswith("\n[]\n")


def test_options_can_be_set_in_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LLORCH_RUN_MAX_TOKENS", "2")
    assert len(invoke("run", "story", "Once upon a time", "--json").stdout.splitlines()) == 2


@pytest.fixture
def bad_files(tmp_path: Path) -> Path:
    (tmp_path / "cut.gguf").write_bytes(builtin_path("micro-llama").read_bytes()[:3000])
    (tmp_path / "text.gguf").write_text("this is no model")
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "model.bin").write_bytes(b"\x80\x04")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        ("run {}/nothing.gguf x", 3, "no such file or folder"),
        ("run storry x", 3, "not a built-in model (micro-llama, micro-llama3, micro-qwen2, micro-qwen3, story, "),
        ("run nowhere x", 3, "micro-qwen3, story, "),
        ("data show story pirat", 3, "not a built-in data set (pirate); did you mean 'pirate'?"),
        ("verify micro-lama", 3, "not a built-in model"),
        ("inspect {}/nothing.gguf", 3, "no such file or folder"),
        ("run {}/cut.gguf x", 2, "cut.gguf: Truncated"),
        ("verify {}/cut.gguf", 2, "cut.gguf: Truncated"),
        ("inspect {}/cut.gguf", 2, "cut.gguf: Truncated"),
        ("trace {}/text.gguf -o {}/t.npz", 2, "text.gguf: BadMagic"),
        ("tokenize {}/empty.gguf x", 2, "empty.gguf: Truncated"),
        ("run {}/folder x", 2, "config.json"),
        ("run {}/model.bin x", 2, "Unsafe"),
        ("run story x -t -1", 2, "temperature must be"),
        ("run story x -t nan", 2, "temperature must be"),
        ("run story x --top-p 0", 2, "top_p must be"),
        ("run story x --stop=", 2, "stop string must not be empty"),
        ("trace story -o {}/no/t.npz", 3, "the folder"),
        ("trace story --first-position 510 -o {}/t.npz", 2, "do not fit the context of 512"),
        ("trace micro-llama --tokens 1,2,9999 -o {}/t.npz", 2, "9999"),
    ],
)
def test_an_error_is_one_line_on_stderr_with_its_exit_code(words: str, code: int, expected: str, bad_files: Path):
    result = invoke(*words.replace("{}", str(bad_files)).split())
    assert result.exit_code == code, result.exception
    line = result.stderr.splitlines()[-1]
    assert line.startswith("llorch: ")
    assert expected in line
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_a_prompt_longer_than_the_context_is_refused_before_anything_is_printed():
    result = invoke("run", "story", "fox " * 700)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "do not fit the context of 512 tokens" in result.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("bogus", "there is no verb 'bogus'"),
        ("verfy", "there is no verb 'verfy'; did you mean 'verify'?"),
        ("trian", "there is no verb 'trian'; did you mean 'lora train'?"),
        ("lora trian", "there is no verb 'trian'; did you mean 'train'?"),
        ("run story x -n zero", "'zero' is not a valid integer."),
        ("run story x -n 0", "0 is not in the range"),
        ("run story x --top-k some", "'some' is not a valid integer"),
        ("run story", "no text: give it as an argument or on stdin"),
        ("tokenize story", "no text"),
        ("verify story --tokens 1,x,3", "got 'x' at place 2"),
        ("verify story --tokens 1,,3", "got '' at place 2"),
        ("verify story --tokens 1,-2", "got '-2' at place 2"),
        ("verify story --tokens 1,2 --prompt hello", "not both"),
        ("trace story hello --tokens 1,2 -o t.npz", "not both"),
        ("trace story hello -o t.txt", ".safetensors or .npz"),
        ("verify story --against candle", "transformers or a dump, got 'candle'"),
        *(
            (f"verify micro-llama {given}", "goldens have their own input")
            for given in ("--tokens 1,2,3", "--prompt hello", "--prompt=")
        ),
        ("verify micro-llama --against golden --against llamacpp", "goes alone"),
        ("verify tests --against golden", "only built-in models have goldens"),
        ("verify micro-llama --backend numpy --device cpu", "--device, --dtype and --kernels go with --backend torch"),
        ("verify micro-llama --backend numpy --kernels own", "--device, --dtype and --kernels go with --backend torch"),
        ("verify micro-llama --backend torch --numerics ggml", "--numerics ggml goes with --backend numpy"),
        ("verify micro-llama --backend torch --weights packed", "--weights goes with --numerics ggml"),
        ("verify micro-llama --backend torch --device gpu", "device: expected cpu, cuda or cuda:N, got 'gpu'"),
        ("run story x --backend numpy --device cpu", "--device goes with --backend torch"),
        ("run story x --backend numpy --dtype float32", "--dtype goes with --backend torch"),
        ("run story x --compile", "--compile goes with --backend torch"),
        ("run story x --backend torch --numerics ggml", "--numerics ggml goes with --backend numpy"),
        ("run story x --backend torch --kv-cache f16", "--kv-cache f16 goes with --backend numpy"),
        ("run story x --backend torch --dtype int8", "'int8' is not one of"),
        ("bench story --shape llama-2-7b", "give a MODEL or --shape, not both"),
        ("bench --weights-type Q8_0 --backend torch", "--weights-type goes with --shape"),
        ("bench --shape llama-2-7b", "--shape goes with --backend torch"),
        ("bench --backend numpy --dtype float32", "--dtype goes with --backend torch"),
        ("bench --backend numpy --kernels own", "--kernels goes with --backend torch"),
        ("bench --compile", "--compile goes with --backend torch"),
        ("bench --shape gpt-2 --backend torch", "'gpt-2' is not one of"),
        ("bench --shape llama-2-7b --backend torch --weights packed", "--weights goes with a MODEL"),
        ("bench --batch 2", "the NumPy path runs one prompt at a time, got --batch 2"),
        ("bench --prompt 5000", "do not fit the context of 512 tokens"),
        ("bench --prompt 5000 --backend torch", "do not fit the context of 512 tokens"),
        ("bench --prompt 5000 --backend torch --shape llama-2-7b", "do not fit the context of 4096 tokens"),
    ],
)
def test_a_usage_error_says_what_was_expected_and_ends_with_two(words: str, expected: str):
    result = invoke(*words.split())
    assert result.exit_code == 2
    assert expected in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_traceback_shows_where_an_error_was_raised():
    result = invoke("--traceback", "run", "story", "x", "-t", "-1")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("llorch: sampling: ")


def test_text_goes_to_stdout_and_rates_to_stderr():
    done = spawn("run", "story", "Once upon a time", "-n", "5", "-v")
    assert done.returncode == 0
    assert "tokens/s" not in done.stdout
    assert "tokens/s" in done.stderr


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


@pytest.mark.parametrize("width", range(60, 81, 4))
def test_no_word_of_a_help_page_is_broken(width: int):
    def pages(command: click.Command, context: click.Context) -> Iterator[str]:
        yield command.get_help(context)
        if not isinstance(command, click.Group):
            return
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from pages(found, found.context_class(found, parent=context, info_name=name))

    top = main.context_class(main, info_name="llorch", terminal_width=width)
    lines = [line for page in pages(main, top) for line in page.splitlines()]
    assert len(lines) > 300
    assert [line for line in lines if line.endswith("-")] == []
    assert not any("\u2011" in line for line in lines)


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
