"""`llorch convert` as a user runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders.quantised_folders import FOLDERS
from builders.tiny_models import random_tensors, write_folder
from helpers.command_line import REPOSITORY, invoke
from helpers.interrupts import heed_interrupts
from helpers.refusals import assert_cli_refuses, assert_tells

from llorch.cli.convert import TYPES
from llorch.files import open_gguf, open_weights
from llorch.files.export import FILE_TYPES
from tests.files.test_convert_failures import names, sparse_model


def test_a_model_is_converted_there_and_back(tmp_path: Path):
    folder, file = str(tmp_path / "folder"), str(tmp_path / "m.gguf")
    result = invoke("convert", "micro-qwen3", folder)
    assert (result.exit_code, result.stderr.count("note:")) == (0, 1)
    assert result.stdout == f"{folder}: F32, 25 tensors, 1.1 MB\n"
    result = invoke("convert", folder, file, "--type", "q8_0")
    assert result.exit_code == 0
    assert result.stdout == f"{file}: Q8_0, 25 tensors, 0.3 MB\n"
    with open_gguf(file) as written:
        assert written.tensors["token_embd.weight"].ggml_type.name == "Q8_0"
    result = invoke("run", file, "Once upon a time", "-n", "3")
    assert result.exit_code == 0


def test_json_says_what_was_done(tmp_path: Path):
    source = write_folder(tmp_path / "a", random_tensors("llama"))
    result = invoke("convert", str(source), str(tmp_path / "m.gguf"), "--type", "Q4_0", "--json")
    found = json.loads(result.stdout)
    (note,) = found.pop("notes")
    assert "tokenizer.json" in note
    assert found == {
        "source": str(source),
        "target": str(tmp_path / "m.gguf"),
        "type": "Q4_0",
        "n_tensors": 21,
        "n_bytes": (tmp_path / "m.gguf").stat().st_size,
        "fallbacks": ["layers.0.down_proj", "layers.1.down_proj"],
        "has_vocabulary": False,
        "kept": {},
        "decoded": {},
    }
    assert_tells(result.stderr, "note: 2 matrices", "F16", "Q4_0", "layers.0.down_proj, layers.1.down_proj")


def test_convert_of_a_quantised_folder_says_what_stays_packed_and_why_the_rest_does_not(tmp_path: Path):
    result = invoke("convert", str(FOLDERS / "ct-mixed"), str(tmp_path / "m.gguf"), "--json")
    found = json.loads(result.stdout)
    assert found["kept"] == {f"layers.0.{name}_proj": "Q4_0" for name in "qkv"}
    assert found["decoded"].keys() == {f"layers.0.{name}_proj" for name in ("gate", "up", "down")}
    assert found["type"] == "F32"
    assert_tells(result.stderr, "3 of 6", "Q4_0", "layers.0.gate_proj", "integers")


def test_all_types_can_be_asked_for():
    assert [one.name for one in FILE_TYPES] == list(TYPES)


@pytest.mark.parametrize(
    ("args", "code", "facts"),
    [
        (("story", "there.gguf"), 2, ("there.gguf: ", "--force")),
        (("story", "b", "--type", "Q8_0"), 2, ("type: ", "F32, F16, BF16", "Q8_0")),
    ],
)
def test_errors_are_one_line_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], code: int, facts: tuple[str, ...]
):
    monkeypatch.chdir(tmp_path)
    Path("there.gguf").touch()
    result = invoke("convert", *args)
    assert_cli_refuses(result, code, *facts)
    assert result.stderr.startswith(f"llorch: {facts[0]}")
    assert result.stderr.count("\n") == 1
    assert names(tmp_path) == ["there.gguf"]


def test_force_replaces(tmp_path: Path):
    target = tmp_path / "m.gguf"
    target.write_text("old")
    assert invoke("convert", "micro-llama", str(target), "--force").exit_code == 0
    assert open_weights(target).config.family == "llama"


@pytest.fixture
def slow_source(tmp_path: Path) -> Path:
    """A model of 2 GB of zeros, which takes no room on the disk but some seconds to convert."""
    return sparse_model(tmp_path / "slow", 1 << 20, 512, 64)


@pytest.mark.nightly_cases("INT")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"])
def test_convert_signal_removes_partial_files(tmp_path: Path, slow_source: Path, number: signal.Signals, code: int):
    command = [sys.executable, "-m", "llorch", "convert", str(slow_source), str(tmp_path / "m.gguf"), "--type", "Q4_0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, preexec_fn=heed_interrupts)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".m.gguf.*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(process.pid, number)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == code
    assert stderr in ("llorch: interrupted\n", "")
    assert names(tmp_path) == ["slow"]


def test_zeros_are_converted(tmp_path: Path):
    tensors = random_tensors("llama")
    tensors["model.layers.0.self_attn.q_proj.weight"][:] = 0  # a zero matrix at the end of a file would be damage
    result = invoke("convert", str(write_folder(tmp_path / "a", tensors)), str(tmp_path / "m.gguf"), "--type", "Q4_0")
    assert result.exit_code == 0
    assert not open_weights(tmp_path / "m.gguf").array("layers.0.q_proj").any()
