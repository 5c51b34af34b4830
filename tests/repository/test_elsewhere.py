"""On a system without `fcntl`, `resource`, signals, owners and synced folders llorch works, or says what is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def elsewhere(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program with what Windows lacks taken away."""
    where = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests/support")))}
    program = [sys.executable, "-c", f"import elsewhere\n{code}"]
    return subprocess.run(program, capture_output=True, text=True, cwd=folder, env=where, check=False, timeout=300)


def test_every_module_that_needs_no_torch_is_imported(tmp_path: Path):
    done = elsewhere(IMPORT_EVERYTHING, tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"llorch.verify.models", "llorch.train.snapshots", "llorch.tokenizer.template_worker"} <= {
        *done.stdout.split()
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "story", "Once upon a time", "-n", "3"),
        ("verify", "micro-llama"),
        ("trace", "micro-llama", "--tokens", "1,2,3", "-o", "t.npz"),
        ("convert", "micro-llama", "folder"),
        ("convert", "micro-llama", "copy.gguf"),
        ("data", "show", "story", "pirate"),
    ],
    ids=" ".join,
)
def test_the_command_line_works(arguments: tuple[str, ...], tmp_path: Path):
    done = elsewhere(f"from llorch.cli import main\nmain({arguments})", tmp_path)
    assert (done.returncode, done.stderr.count("rror")) == (0, 0), done.stderr


def test_a_snapshot_is_written_and_nothing_locks_its_folder(tmp_path: Path):
    code = (
        "from llorch.train.snapshots import SnapshotStore\nimport numpy\nfrom pathlib import Path\n"
        "store = SnapshotStore(Path('run'))\nwith store.lock() as without:\n"
        " print(without)\n store.save(1, {'a': numpy.ones(3)}, {})\nprint(store.steps())"
    )
    assert elsewhere(code, tmp_path).stdout.splitlines()[-2:] == [
        "this system has no flock: see to it that no second run writes to the folder",
        "[1]",
    ]


def test_an_engine_that_cannot_be_asked_is_one_sentence(tmp_path: Path):
    code = "from llorch.verify.witnesses.process import EngineProcess\nEngineProcess('llamacpp')"
    assert elsewhere(code, tmp_path).stderr.splitlines()[-1] == (
        "llorch.errors.EngineDied: llamacpp: engines run in processes that this system cannot be connected to; "
        "the goldens of built-in models need none"
    )
