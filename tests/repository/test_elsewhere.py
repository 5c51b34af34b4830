"""On a system without `fcntl`, `resource`, signals, owners and synced folders llorch works, or says what is missing."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.refusals import assert_tells

ROOT = Path(__file__).parents[2]
IMPORT_EVERYTHING = """
import pkgutil, sys, llorch
optional = ("torch", "triton", "transformers", "llama_cpp", "peft", "matplotlib", "yaml", "tensorboard")
sys.modules |= dict.fromkeys(optional)
for module in pkgutil.walk_packages(llorch.__path__, "llorch.", onerror=lambda name: None):
    try:
        module.name.endswith("__main__") or __import__(module.name)
        print(module.name)
    except ModuleNotFoundError as error:
        assert error.name.split(".")[0] in optional, error
"""
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("run", "story", "Once upon a time", "-n", "3"),
    ("verify", "micro-llama"),
    ("trace", "micro-llama", "--tokens", "1,2,3", "-o", "t.npz"),
    ("convert", "micro-llama", "folder"),
    ("convert", "micro-llama", "copy.gguf"),
    ("data", "show", "story", "pirate"),
)
END = "\x1e"  # of what a command says on stderr
RUN_COMMANDS = f"""
import json, pathlib
from llorch.cli import main
codes = []
for arguments in {COMMANDS}:
    try:
        main(arguments)
    except SystemExit as end:
        codes.append(end.code)
    print(end={END!r}, file=sys.stderr, flush=True)
pathlib.Path("codes.json").write_text(json.dumps(codes))
"""


def elsewhere(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program with what Windows lacks taken away."""
    where = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests/support")))}
    program = [sys.executable, "-c", f"import fakes.elsewhere\n{code}"]
    return subprocess.run(program, capture_output=True, text=True, cwd=folder, env=where, check=False, timeout=300)


@dataclass(frozen=True)
class Seen:
    """Modules that one process imported, and exit code and stderr of each command that it ran then."""

    modules: set[str]
    commands: dict[tuple[str, ...], tuple[int, str]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("elsewhere")
    done = elsewhere(IMPORT_EVERYTHING + RUN_COMMANDS, folder)
    assert done.returncode == 0, done.stderr
    codes = json.loads((folder / "codes.json").read_text())
    *said, last = done.stderr.split(END)
    assert last == ""
    return Seen({*done.stdout.split()}, dict(zip(COMMANDS, zip(codes, said, strict=True), strict=True)))


@pytest.mark.slow
def test_every_module_that_needs_no_torch_is_imported(seen: Seen):
    modules = {"llorch.judging.verify", "llorch.training.snapshots", "llorch.files.tokenizer.template_worker"}
    assert modules <= seen.modules


@pytest.mark.nightly_cases(but=["trace mi*"])
@pytest.mark.slow
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_the_command_line_works(arguments: tuple[str, ...], seen: Seen):
    exit_code, stderr = seen.commands[arguments]
    assert (exit_code, stderr.count("rror")) == (0, 0), stderr


def test_a_snapshot_is_written_and_nothing_locks_its_folder(tmp_path: Path):
    code = (
        "from llorch.training.snapshots import SnapshotStore\nimport numpy\nfrom pathlib import Path\n"
        "store = SnapshotStore(Path('run'))\nwith store.lock() as without:\n"
        " print(without)\n store.save(1, {'a': numpy.ones(3)}, {})\nprint(store.steps())"
    )
    without, steps = elsewhere(code, tmp_path).stdout.splitlines()[-2:]
    assert_tells(without, "flock")
    assert steps == "[1]"


def test_an_engine_that_cannot_be_asked_is_one_sentence(tmp_path: Path):
    code = "from llorch.engines.process import EngineProcess\nEngineProcess('llamacpp')"
    kind, said = elsewhere(code, tmp_path).stderr.splitlines()[-1].split(": ", 1)
    assert kind == "llorch.runtime.errors.EngineDied"
    assert_tells(said, "llamacpp", "system", "built-in")
