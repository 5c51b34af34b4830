"""Files that are no regular files, and files that are cut while they are open."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from builders.tiny_models import random_tensors, write_folder
from helpers.command_line import REPOSITORY, invoke
from helpers.refusals import assert_tells

from llorch.files import open_gguf, open_safetensors, open_weights
from llorch.files.tokenizer.huggingface import HuggingFaceVocabulary
from llorch.lora.peft_config import read_config
from llorch.runtime.builtin import builtin_path
from llorch.runtime.errors import FormatError

CUT = """
import os, sys, llorch
from llorch.runtime.errors import FormatError
model = llorch.load(sys.argv[1])
model.forward([1, 2, 3])
os.truncate(sys.argv[1], 4096)
try:
    model.forward([1, 2, 3])
except FormatError as error:
    print(error)
"""


def test_a_gguf_file_that_is_cut_between_two_runs_is_an_error_not_a_dead_process(tmp_path: Path):
    path = tmp_path / "cut.gguf"
    shutil.copy(builtin_path("micro-llama"), path)
    command = [sys.executable, "-c", CUT, path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert_tells(done.stdout, "Truncated", builtin_path("micro-llama").stat().st_size, "4096 bytes", where=path)


def test_a_closed_file_is_no_longer_watched(tmp_path: Path):
    weights = open_weights(write_folder(tmp_path, random_tensors("llama")))
    before = weights["lm_head"].copy()
    weights.source.close()
    assert np.array_equal(weights["lm_head"], before)


@pytest.fixture
def soon() -> Iterator[None]:
    """End a test that would wait for ever, with an error after a minute."""

    def give_up(*_: object) -> None:
        raise AssertionError("still waiting")

    old = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="NOT RUN: no named pipes here")
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("name", "opened"),
    [
        ("config.json", open_weights),
        ("model.safetensors", open_weights),
        ("model.safetensors.index.json", open_weights),
        ("tokenizer.json", HuggingFaceVocabulary),
        ("adapter_config.json", read_config),
        ("adapter_model.safetensors", lambda folder: open_safetensors(folder / "adapter_model.safetensors")),
        ("model.gguf", lambda folder: open_gguf(folder / "model.gguf")),
    ],
)
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(tmp_path: Path, name: str, opened: Callable[[Path], object]):
    write_folder(tmp_path, random_tensors("llama"))
    if name.endswith("index.json"):
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(FormatError) as caught:
        opened(tmp_path)
    assert caught.value.code in ("Unsupported", "Missing")
    assert_tells(str(caught.value), name)


FILES = {  # command, and the ending of the file that it reads
    "run {} x": ".gguf", "inspect {}": ".gguf", "run story x --adapter {}": ".gguf", "run story --history {}": ".json",
    "quality story --text {}": ".txt", "lora train story --data {} -o new": ".jsonl",
    "data show story {}": ".jsonl", "lora train story --data pirate --config {} -o new": ".toml",
    "diagnose {} --model micro-llama": ".npz", "diagnose dump --model micro-llama --map {}": ".toml",
    "diff {} {}": ".safetensors", "learn check 01 --answers {}": ".npz", "lora inspect {}": ".gguf",
}  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="NOT RUN: no named pipes here")
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder"])
@pytest.mark.parametrize("words", FILES)
def test_a_command_refuses_at_once_to_read_what_is_no_file(
    words: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if "lora train" in words:
        pytest.importorskip("torch", reason="NOT RUN: torch is not installed")
    monkeypatch.chdir(tmp_path)
    np.savez("dump.npz", logits=np.zeros((1, 1)))
    name = "it" + FILES[words]
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(name)  # a short name: the length of a socket's is bounded
    elif kind == "device":
        Path(name).symlink_to("/dev/zero")
    else:
        os.mkfifo(name) if kind == "pipe" else Path(name).mkdir()
    result = invoke(*words.replace("diagnose dump", "diagnose dump.npz").replace("{}", name).split())
    assert result.exit_code in (2, 3), (result.stdout, result.stderr)
    assert "Traceback" not in result.stderr
    assert_tells(result.stderr, name)
