"""`llorch trace`."""

import errno
import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest
from builders.quantised_folders import FOLDERS
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses
from safetensors import safe_open
from safetensors.numpy import load_file

import llorch
from llorch.cli.dump_writer import WRITERS
from llorch.cli.inputs import SENTENCE
from llorch.engines.dumps.index import open_raw
from llorch.engines.dumps.stage_dump import Features
from llorch.ops.rope import rope
from llorch.stages.stage_ref import Tokens
from tests.engines.dumps.test_writers import WRITERS as FILES

IDS = [3, 1, 4, 15, 9, 2, 6, 5]
TOKENS = ",".join(map(str, IDS))


def read_npz(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


def test_both_formats_hold_the_trace_of_the_python_interface(tmp_path: Path):
    trace: dict[str, np.ndarray] = {}
    llorch.load("micro-llama").forward(IDS, trace=trace)
    for name in ("t.safetensors", "t.npz"):
        result = invoke("trace", "micro-llama", "--tokens", TOKENS, "-o", str(tmp_path / name))
        assert result.exit_code == 0, result.stderr
        assert result.stdout == ""
        assert f"wrote {len(trace)} stages of 8 tokens" in result.stderr
        read = load_file(tmp_path / name) if name.endswith("s") else read_npz(tmp_path / name)
        assert read.keys() == trace.keys()
        assert all(np.array_equal(read[key], trace[key]) for key in trace)


def test_the_file_says_what_was_run(tmp_path: Path):
    path = tmp_path / "t.safetensors"
    invoke("trace", "micro-llama", "--tokens", TOKENS, "--first-position", "4000", "-o", str(path))
    with safe_open(path, "np") as file:
        about = json.loads(file.metadata()["llorch"])
    assert about == {"engine": "llorch", "first_position": 4000, "ids": IDS, "model": "micro-llama"}


def test_a_folder_is_the_dump_that_others_write(tmp_path: Path):
    trace: dict[str, np.ndarray] = {}
    llorch.load("micro-llama").forward(IDS, trace=trace, first_position=7)
    for _ in range(2):  # the second replaces the first
        command = ("trace", "micro-llama", "--tokens", TOKENS, "--first-position", "7", "-o", f"{tmp_path / 'dump'}/")
        result = invoke(*command)
        assert result.exit_code == 0, result.stderr
    dump = open_raw(tmp_path / "dump")
    assert (dump.passes, dump.features) == ((Tokens(tuple(IDS), 7),), Features("llorch", "float32", "float32"))
    assert [array.name for _, array in dump.arrays] == list(trace)
    assert all(np.array_equal(array.read(), trace[array.name]) for _, array in dump.arrays)


@pytest.mark.parametrize("name", ["folder", "folder.npz", "file"])
def test_folder_that_is_no_dump_is_not_replaced(tmp_path: Path, name: str):
    (tmp_path / "file").write_text("mine")
    for folder in ("folder", "folder.npz"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    result = invoke("trace", "micro-llama", "--tokens", TOKENS, "-o", str(tmp_path / name))
    assert_cli_refuses(result, 2, tmp_path / name, "replace")
    assert sorted(tmp_path.rglob("*")) == before


def test_trace_first_position_rotates_queries_but_not_values(tmp_path: Path):
    for first in ("0", "4000"):
        path = tmp_path / f"{first}.npz"
        invoke("trace", "micro-llama", "--tokens", TOKENS, "--first-position", first, "-o", str(path))
    near, far = read_npz(tmp_path / "0.npz"), read_npz(tmp_path / "4000.npz")
    assert np.array_equal(near["l0.v_proj"], far["l0.v_proj"])
    assert not np.allclose(near["l0.q_rope"], far["l0.q_rope"], atol=1e-3)


@pytest.mark.parametrize("name", ["t.npz", "t.safetensors", "t"])
@pytest.mark.usefixtures("no_bytecode")
def test_a_full_disk_is_one_line_that_names_the_file(tmp_path: Path, name: str):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        result = invoke("trace", "micro-llama", "--tokens", TOKENS, "-o", str(tmp_path / name))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (result.exit_code, result.stderr) == (74, f"llorch: {tmp_path / name}: {os.strerror(errno.EFBIG)}\n")
    assert list(tmp_path.iterdir()) == []


def test_trace_failed_run_keeps_the_old_file(tmp_path: Path):
    old = tmp_path / "t.npz"
    old.write_text("old")
    assert invoke("trace", "micro-llama", "--tokens", "1,2,9999", "-o", str(old)).exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["t.npz"]
    assert old.read_text() == "old"


@pytest.mark.parametrize("name", ["t.npz", "t.safetensors"])
def test_an_error_in_layer_1_is_found_there_whatever_the_order_of_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert invoke("trace", "micro-llama", "--tokens", TOKENS, "-o", str(tmp_path / name)).exit_code == 0
    theirs = read_npz(tmp_path / name) if name == "t.npz" else load_file(tmp_path / name)
    calls = iter(range(99))
    monkeypatch.setattr("llorch.model.forward.rope", lambda x, cos, sin: rope(x, cos, -sin if next(calls) > 1 else sin))
    ours: dict = {}
    llorch.load("micro-llama").forward([int(one) for one in TOKENS.split(",")], trace=ours)
    assert llorch.compare(ours, theirs).first_divergence == "l1.q_rope"


def test_a_trace_is_never_written_into_the_model_folder(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    result = invoke("trace", str(tmp_path), "hello", "-o", str(tmp_path / "model.safetensors"))
    assert_cli_refuses(result, 2, tmp_path / "model.safetensors", "inside")


def test_without_a_prompt_a_fixed_sentence_is_run_and_named(tmp_path: Path):
    result = invoke("trace", "micro-llama", "-o", str(tmp_path / "t.npz"))
    assert result.exit_code == 0
    assert repr(SENTENCE) in result.stderr


@pytest.mark.live
@pytest.mark.parametrize("engine_name", ["llamacpp", "transformers"])
def test_an_engine_writes_the_same_stages_with_the_same_shapes(engine_name: str, tmp_path: Path):
    for name, engine in (("ours.npz", []), ("theirs.npz", ["--producer", engine_name])):
        result = invoke("trace", "micro-llama", "--tokens", TOKENS, "-o", str(tmp_path / name), *engine)
        assert result.exit_code == 0, result.stderr
    ours, theirs = read_npz(tmp_path / "ours.npz"), read_npz(tmp_path / "theirs.npz")
    assert llorch.compare(ours, theirs).agrees


@pytest.mark.parametrize("name", ["ct-w4a16", "mlx-3bit", "bnb-nf4-double"])
def test_trace_of_a_quantised_folder_has_the_logits_of_the_foreign_engine(name: str, tmp_path: Path):
    said = json.loads((FOLDERS / "goldens.json").read_text())[name]["forward"]
    words = ("--tokens", ",".join(map(str, said["tokens"])), "-o", str(tmp_path / "t.npz"))
    result = invoke("trace", str(FOLDERS / name), *words)
    assert result.exit_code == 0, result.stderr
    made = read_npz(tmp_path / "t.npz")["logits"][said["positions"]]
    wanted = load_file(FOLDERS / "logits.safetensors")[f"{name}/weights"]
    assert np.linalg.norm(made - wanted) < 1e-5 * np.linalg.norm(wanted)


@pytest.mark.parametrize("language", WRITERS)
def test_a_writer_is_printed_as_it_is(language: str):
    (path,) = [path for path in FILES if path.name == WRITERS[language]]
    assert invoke("dump-writer", language).stdout == path.read_text(encoding="utf-8")


def test_the_index_of_the_help_page_is_read(tmp_path: Path):
    page = invoke("dump-writer", "--help").stdout
    (tmp_path / "index.jsonl").write_text("".join(line + "\n" for line in page.splitlines() if line.strip()[:1] == "{"))
    (tmp_path / "q.bin").write_bytes(bytes(3 * 64 * 4))
    dump = open_raw(tmp_path)
    assert dump.passes == (Tokens((9, 4, 7)),)
    assert [(array.name, array.layer, array.shape) for _, array in dump.arrays] == [("q", 0, (3, 64))]


def test_every_writer_can_be_had():
    assert sorted(WRITERS.values()) == [path.name for path in FILES]


def test_another_language_is_refused_with_those_there_are():
    result = invoke("dump-writer", "fortran")
    assert_cli_refuses(result, 2, "'fortran'", "'python', 'c', 'rust', 'ggml'")
