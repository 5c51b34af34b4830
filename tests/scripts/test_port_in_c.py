"""benchmarks/diagnosis/port.c, compiled and run: it has one bug, and llorch names it."""

import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from helpers.command_line import REPOSITORY, invoke
from readme_blocks import readme_block

from llorch.diagnosis.diagnose import diagnose
from llorch.engines.dumps.index import open_raw
from llorch.engines.dumps.mapping import read_mapping
from llorch.engines.dumps.stage_dump import StageDump
from llorch.engines.dumps.stage_mapping import stage_dump
from llorch.files import Weights, open_weights
from llorch.model.model import load
from llorch.stages.comparison import compare

FOLDER = REPOSITORY / "benchmarks" / "diagnosis"
SOURCE = (FOLDER / "port.c").read_text()
IDS = {
    "story": [998, 466, 467, 258, 415, 411, 277, 258, 434, 429, 261, 785],  # Once upon a time there was a small red fox
    "micro-qwen2": [3, 1, 4, 15, 9, 2, 6, 5],
}
# The bug: pairs of neighbours are turned, the weights of the folder pair i with i + head_dim / 2.
BUG = "i < head_dim; i += 2) {", "-(double)i / head_dim", "x[i + 1]"
RIGHT = "i < head_dim / 2; i++) {", "-2.0 * i / head_dim", "x[i + head_dim / 2]"


def repaired() -> str:
    """The source without its bug."""
    source = SOURCE
    for wrong, right in zip(BUG, RIGHT, strict=True):
        assert wrong in source
        source = source.replace(wrong, right)
    return source


def require_compiler() -> None:
    if shutil.which("cc") is None:
        pytest.skip("NOT RUN: there is no C compiler, cc, on this machine")


def run_program(command: list, folder: Path) -> None:
    """Run a program that has to succeed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The program of a source text, which is compiled once."""
    require_compiler()
    headers = REPOSITORY / "llorch" / "engines" / "dumps" / "writers"

    @cache
    def program(source: str) -> Path:
        folder = tmp_path_factory.mktemp("port")
        (folder / "port.c").write_text(source)
        run_program(["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-I", headers, "port.c", "-lm", "-o", "port"], folder)
        return folder / "port"

    return program


def dumped(folder: Path, program: Path, model: str) -> tuple[StageDump, Weights]:
    """Run the port on a built-in model; returns its dump and its weights."""
    assert invoke("convert", model, str(folder / "model")).exit_code == 0
    run_program([program, "model", "dump", *map(str, IDS[model])], folder)
    weights = open_weights(folder / "model")
    mapping = read_mapping(FOLDER / "port.toml")
    return stage_dump(open_raw(folder / "dump"), weights.config, mapping=mapping, weights=weights), weights


@pytest.mark.parametrize("model", IDS)
def test_without_its_bug_the_port_is_right(model: str, compiled: Callable[[str], Path], tmp_path: Path):
    dump, weights = dumped(tmp_path, compiled(repaired()), model)
    trace: dict = {}
    load(model).forward(IDS[model], trace=trace)
    seen = {key: one.read() for key, one in dump.of_pass(0)}
    assert len(seen) == 13
    assert compare(seen, {key: trace[key] for key in seen}).agrees
    assert diagnose(weights, dump).is_right


@pytest.mark.nightly_cases("story")
@pytest.mark.parametrize("model", IDS)
def test_its_bug_is_named(model: str, compiled: Callable[[str], Path], tmp_path: Path):
    dump, weights = dumped(tmp_path, compiled(SOURCE), model)
    (finding,) = diagnose(weights, dump).findings
    assert [cause.name for cause in finding.causes] == ["rope-interleaved-pairs"]
    assert finding.key == "l0.q_rope"


@pytest.mark.slow
def test_the_three_commands_of_the_readme_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    require_compiler()
    commands, shown = readme_block("port"), readme_block("port", kind="printed")
    for folder in ("llorch", "benchmarks"):
        (tmp_path / folder).symlink_to(REPOSITORY / folder)
    monkeypatch.chdir(tmp_path)
    convert, compile_and_run, diagnosis = commands.splitlines()
    assert invoke(*convert.split()[1:]).exit_code == 0
    subprocess.run(compile_and_run, shell=True, check=True, capture_output=True, timeout=120)
    result = invoke(*diagnosis.split()[1:])
    assert result.exit_code == 1
    assert " ".join(shown.splitlines()[-1].split()) in " ".join(result.stdout.split())
