"""README.md and the pages that it links to: Python and commands run, links lead somewhere, printed output is real."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from builders.vocabularies import published_model
from helpers.command_line import invoke, spawn
from helpers.refusals import refuses
from readme_blocks import PAGES as MARKED
from readme_blocks import marked_block, readme_block

from llorch.cli import main

ROOT = Path(__file__).parents[2]
GUIDE = [page.relative_to(ROOT).as_posix() for page in MARKED if page.name != "README.md"]
HOW_TO = sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "checkpoints/how_to").glob("*.md"))
NAMES = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md", "benchmarks/README.md",
         "benchmarks/by_hand.md", "tests/README.md", "checkpoints/mesh/README.md",
         "benchmarks/atlas/README.md", "benchmarks/atlas/results/README.md",
         *HOW_TO, *GUIDE)  # fmt: skip
PAGES = {name: (ROOT / name).read_text() for name in NAMES}
README = PAGES["README.md"]
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
SHELL = dict.fromkeys(  # each line once, in the order of the pages
    line
    for name in ("README.md", *GUIDE)
    for language, block in BLOCK.findall(PAGES[name])
    if not language
    for line in block.splitlines()
    if line.startswith("llorch ")
)
TRAINING, LEARNING, FIRST = (readme_block(name).splitlines() for name in ("train", "learn", "first-lesson"))
FINE_TUNING = readme_block("fine-tune").splitlines()
PORTING = readme_block("port").splitlines()  # run by test_port_in_c.py
PUBLISHED = readme_block("published").splitlines()
PARSED = [line for line in SHELL if "path/to" in line]
BUILTIN_ONLY = [
    pytest.param(line, marks=pytest.mark.nightly if "verify" in line or "--mesh" in line else ())
    for line in SHELL
    if line not in (*PARSED, *TRAINING, *FINE_TUNING, *PUBLISHED, *PORTING, *LEARNING, *FIRST)
    and line not in ("llorch serve story", "llorch verify")  # a server ends when it is told to: tests/cli/test_serve.py
]  # the last runs in tests/cli/test_verify.py, beside the figures of benchmarks/README.md


def test_the_table_of_the_atlas_is_the_one_that_was_made():
    shown = PAGES["benchmarks/atlas/README.md"].partition("<!-- atlas -->\n")[2].partition("<!-- end -->")[0]
    assert shown.count("\n") > 8
    assert shown in PAGES["benchmarks/atlas/results/README.md"]


def test_the_first_two_blocks_get_and_install_llorch():
    first, second = (readme_block(name) for name in ("install", "test"))
    clone, install = [block for _, block in BLOCK.findall(README)][:2]
    assert re.fullmatch(r"git clone <[a-z ]+> llorch && cd llorch\n", clone)  # until there is a public address
    assert install == first
    assert first.splitlines() == ["pip install -c constraints.txt -e .", "llorch verify"]
    install, tests = second.splitlines()
    assert (install, tests.split()[0]) == ('pip install -c constraints.txt -e ".[dev]"', "pytest")
    assert tests.endswith("pytest -k checkpoint")


def test_the_four_doors_come_first_each_with_commands_and_a_verdict():
    doors = re.split(r"^## (.*)\n", README, flags=re.MULTILINE)[1:9]
    assert doors[::2] == ["Port a model", "Learn how it works", "Fine-tune", "Serve"]
    for text in doors[1::2]:
        commands, verdict = text.index("```\n"), text.index("<!-- printed: ")
        assert commands < verdict
        assert text[:commands].count("\n") <= 8  # lines of prose, with their marker


def test_readme_counts_are_right_and_each_stage_has_three_outputs():
    from helpers.stored_goldens import golden_of

    from llorch.judging.goldens.forward import ENGINES
    from llorch.runtime.builtin import EVERY

    source = (ROOT / "llorch/model/forward.py").read_text()
    counts = re.findall(r"forward pass in (\d+) lines.*? for (\d+) models, (\d+) of them", README, re.DOTALL)[0]
    n_both = sum({*ENGINES} <= golden_of(name).engine_outputs.keys() for name in EVERY)
    assert [int(count) for count in counts] == [source.count("\n"), len(EVERY) + 1, n_both]
    golden = golden_of("micro-qwen3")
    stages = {*re.findall(r'keep\("(\w+)"', source)}
    assert len(stages) > 20
    for output in (*(golden.engine_outputs[engine] for engine in ENGINES), golden.reference.engine_output):
        assert stages <= {name.rpartition(".")[2] for trace in output.traces.values() for name in trace}


def test_models_whose_weights_llorch_decodes_for_transformers_are_those_of_the_readme():
    from helpers.stored_goldens import golden_of

    from llorch.runtime.builtin import EVERY

    (names,) = re.findall(r"transformers does so for (.*?) and quantised folders", README, re.DOTALL)
    decoded = [name for name in EVERY if golden_of(name).engine_outputs["transformers"].load_path.decoded == "llorch"]
    assert re.split(r",\s+", names) == decoded


@pytest.mark.parametrize("block", ["", "<!-- run: some -->\n```\nx\n```\n"])
def test_a_marker_that_is_missing_or_doubled_is_refused_by_name(block: str):
    with refuses(ValueError, where="<!-- run: some -->", got=2 * block.count("run:"), expected="once"):
        marked_block(f"{block}\n{block}", "some")


def test_a_marker_above_no_block_is_refused_by_name():
    with refuses(ValueError, where="<!-- run: some -->", got="none"):
        marked_block("<!-- run: some -->\n\n<!-- run: other -->\n```\nx\n```\n", "some")


def test_a_block_is_printed_without_llorch(tmp_path: Path):
    program = [sys.executable, "-I", "-S", ROOT / "tests/support/readme_blocks.py"]
    done = [subprocess.run([*program, name], capture_output=True, text=True, cwd=tmp_path) for name in ("test", "none")]
    assert [each.returncode for each in done] == [0, 1]
    assert done[0].stdout == readme_block("test")
    assert "<!-- run: none -->" in done[1].stderr


@pytest.mark.parametrize("line", BUILTIN_ONLY)
def test_a_command_on_built_in_models_runs(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    if "--mesh" in line:
        from helpers.mesh_programs import invoke_on_mesh  # which imports torch

        done = invoke_on_mesh(tmp_path, *shlex.split(line)[1:])
        assert done.exit_code == 0, done.stderr
    else:
        result = invoke(*shlex.split(line)[1:])
        assert result.exit_code == 0, result.output


def test_the_first_commands_of_a_learner_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, watch, *others = (line.partition("#")[0].strip() for line in LEARNING)
    assert (first, watch) == ("llorch learn init my_llama && cd my_llama", "llorch learn")
    assert spawn(*shlex.split(first.partition(" && ")[0])[1:], cwd=tmp_path).returncode == 0
    monkeypatch.chdir(tmp_path / "my_llama")
    for command in others:
        done = invoke(*shlex.split(command)[1:])
        assert done.exit_code == 0, (command, done.output)


@pytest.mark.parametrize("line", PARSED)
def test_a_command_with_a_path_is_parsed_by_the_command_line(line: str):
    command: click.Command = main
    arguments, context = shlex.split(line, comments=True)[1:], None
    while isinstance(command, click.Group):
        context = command.make_context(command.name, [arguments[0]], parent=context, resilient_parsing=True)
        _, found, _ = command.resolve_command(context, [arguments[0]])
        assert found is not None, line
        command, arguments = found, arguments[1:]
    command.make_context(command.name, arguments, parent=context)


def test_the_first_lesson_prints_what_the_readme_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert invoke(*shlex.split(FIRST[0])[1:]).exit_code == 0
    lesson = Path("my_llama/l01_rms_norm.py")
    *_, root, normed = readme_block("first-lesson", kind="written").splitlines()
    lesson.write_text(lesson.read_text().replace("    raise NotImplementedError", f"{root}\n{normed}"))
    done = invoke(*shlex.split(FIRST[1])[1:])
    assert done.exit_code == 1
    printed = {" ".join(line.split()) for line in done.output.splitlines()}
    assert {" ".join(line.split()) for line in readme_block("first-lesson", kind="printed").splitlines()} <= printed


def losses(printed: str) -> tuple[str, str]:
    (found,) = re.findall(r"^validation loss (\S+) before, (\S+) after$", printed, re.MULTILINE)
    return found


@pytest.mark.parametrize("n_steps", [1, pytest.param(None, marks=pytest.mark.nightly)])  # 80 s, the same code
def test_fine_tuning_prints_what_the_readme_shows(n_steps: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    if n_steps:
        monkeypatch.setenv("LLORCH_LORA_TRAIN_STEPS", str(n_steps))
    trained, told = (invoke(*shlex.split(line)[1:]) for line in FINE_TUNING)
    assert (trained.exit_code, told.exit_code) == (0, 0), trained.output + told.output
    before, after = losses(readme_block("fine-tune", kind="printed"))
    assert losses(trained.output)[0] == before  # of the model as it is shipped: it has four digits on any processor
    assert n_steps or float(losses(trained.output)[1]) == pytest.approx(float(after), rel=0.05)
    assert told.stdout.strip()


@pytest.mark.live
@pytest.mark.weights
@pytest.mark.parametrize("n_steps", [1, pytest.param(30, marks=pytest.mark.nightly)])  # 100 s, the same code
def test_a_published_model_becomes_a_pirate(n_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "smollm2.gguf").symlink_to(published_model())
    monkeypatch.chdir(tmp_path)
    train, merge, answer = PUBLISHED
    python = shlex.quote(sys.executable)
    assert "--steps 30" in train
    for line in (train.replace("--steps 30", f"--steps {n_steps}"), merge):
        done = invoke(*shlex.split(line)[1:])
        assert done.exit_code == 0, done.output
    said = subprocess.run(re.sub("^python", python, answer), shell=True, capture_output=True, text=True, check=True)
    shown = readme_block("published", kind="printed")
    assert said.stdout.strip()
    assert n_steps == 1 or said.stdout.split()[:2] == shown.split()[:2]  # the rest may differ on another processor


def test_the_server_answers_what_the_readme_shows():
    (body,) = re.findall(r"^curl localhost:8080/v1/completions -d '(.*)'$", README, re.MULTILINE)
    request, answer = json.loads(body), json.loads(readme_block("serve", kind="printed"))
    assert request.pop("temperature") == 0
    arguments = "run", request["model"], request["prompt"], "-t", "0", "-n", str(request["max_tokens"])
    done = invoke(*arguments)
    assert done.exit_code == 0
    assert answer == {"text": done.stdout.removeprefix(request["prompt"]).rstrip("\n"), "finish_reason": "length"}


def program(block: str, folder: Path) -> str:
    """What a block prints that is run as a program of its own."""
    where = {"PYTHONPATH": str(ROOT)} | os.environ
    run = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=folder, env=where)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_first_python_example_is_a_program_and_finds_what_it_says(tmp_path: Path):
    (said,) = re.findall(r"print\(.*: (\S+)$", readme_block("compare"), re.MULTILINE)
    assert program(readme_block("compare"), tmp_path).splitlines()[-1].startswith(f"{said}:")


def test_the_example_of_a_batch_is_a_program(capsys: pytest.CaptureFixture[str]):
    exec(readme_block("batch"), {})
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines if line[:2] in ("0 ", "1 ")} == {"0", "1"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which the block about training was run, line by line, with fewer steps."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("LLORCH_LORA_TRAIN_STEPS", "6")
        for line in TRAINING[1:]:
            result = invoke(*shlex.split(line)[1:])
            assert result.exit_code == 0, (line, result.output)
        yield folder


@pytest.mark.slow
def test_readme_training_block_writes_adapter_merged_model_and_exports(trained: Path):
    assert TRAINING[0] == 'pip install -c constraints.txt -e ".[train]"'
    assert {"my-adapter", "merged.gguf", "my-adapter.gguf", "story-folder"} == {path.name for path in trained.iterdir()}
    assert (trained / "my-adapter" / "curve.svg").is_file()


@pytest.mark.slow
def test_an_adapter_is_used_from_python_as_shown(trained: Path):
    assert program(readme_block("adapter"), trained)


@pytest.mark.live
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # transformers about itself
def test_the_trained_files_are_loaded_by_peft_and_llama_cpp_as_shown(trained: Path, capsys: pytest.CaptureFixture[str]):
    exec(readme_block("engines"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("page", "link"), [(page, link) for page, text in PAGES.items() for link in re.findall(r"\]\(([^)]+)\)", text)]
)
def test_a_link_leads_to_a_file_or_a_heading(page: str, link: str):
    path, _, anchor = link.partition("#")
    target = (ROOT / page).parent / path if path else ROOT / page
    assert target.exists()
    if anchor:
        headings = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "name", sorted({name for page in PAGES.values() for name in re.findall(r"python (\S+\.py)", page)})
)
def test_a_script_that_is_named_exists(name: str):
    assert (ROOT / name).exists()
