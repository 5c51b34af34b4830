"""What a conversion leaves behind when it fails, and the memory that it takes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from command_line import REPOSITORY
from tiny_models import write_folder

from llorch.builtin import builtin_path
from llorch.convert import convert
from llorch.files import open_weights


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("target", ["m.gguf", "folder"])
def test_an_interruption_leaves_nothing(tmp_path: Path, target: str):
    def interrupt(line: str) -> None:
        assert any(name.startswith(f".{target}.") for name in names(tmp_path))
        if line.startswith("20/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(builtin_path("story"), tmp_path / target, report=interrupt)
    assert names(tmp_path) == []


FULL = """
import resource, sys
from llorch.convert import convert
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    convert(sys.argv[1], sys.argv[2], force=True)
except OSError as error:
    sys.exit(f"{error.filename}: {error.strerror}")
"""


@pytest.mark.parametrize("target", ["m.gguf", "folder"])
@pytest.mark.parametrize("room", [100, 20_000, 200_000, 1_000_000])
def test_a_write_that_fails_in_the_middle_leaves_the_old_target(tmp_path: Path, target: str, room: int):
    convert(builtin_path("micro-qwen3"), tmp_path / target)
    command = [sys.executable, "-c", FULL, str(builtin_path("micro-llama")), str(tmp_path / target), str(room)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY, timeout=300)
    assert done.returncode == 1
    assert done.stderr.strip() == f"{tmp_path / target}: File too large; nothing was written"
    assert names(tmp_path) == [target]
    assert open_weights(tmp_path / target).config.family == "qwen3"


def test_a_target_that_cannot_fit_is_refused_before_it_is_written(tmp_path: Path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    rows, width = 1 << 24, 8
    while rows * width * 4 < 2 * free:
        width *= 2
    shapes = {"model.embed_tokens.weight": (rows, width), "model.norm.weight": (width,)}
    block = "model.layers.0."
    shapes |= {block + name: (width,) for name in ("input_layernorm.weight", "post_attention_layernorm.weight")}
    shapes |= {f"{block}self_attn.{part}_proj.weight": (width, width) for part in "qkvo"}
    shapes |= {block + "mlp.gate_proj.weight": (8, width), block + "mlp.up_proj.weight": (8, width)}
    shapes[block + "mlp.down_proj.weight"] = (width, 8)
    source = tmp_path / "a"
    write_folder(
        source, {}, hidden_size=width, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=rows, tie_word_embeddings=True,
    )  # fmt: skip
    write_sparse(source / "model.safetensors", shapes)
    with pytest.raises(OSError, match=r"needs [0-9.]+ GB, but only [0-9.]+ GB are free; nothing was written"):
        convert(source, tmp_path / "m.gguf")
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("total", "reason"), [(9000, r"needs \d\d\d+ kB, but only 3 kB are free"), (0, "No such file or directory")]
)
def test_little_room_is_told_in_its_unit_and_a_file_system_without_any_by_the_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, reason: str
):
    target = tmp_path / "m.gguf" if total else Path("/proc/m.gguf")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=total, free=total // 3))
    with pytest.raises(OSError, match=f"{reason}; nothing was written"):
        convert(builtin_path("micro-llama"), target)


def write_sparse(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of zeros that takes no room on the disk."""
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@contextmanager
def without_privileges() -> Iterator[None]:
    """Root may write anywhere; nobody may not."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("target", ["m.gguf", "folder"])
def test_a_folder_that_may_not_be_written_is_named(tmp_path_factory: pytest.TempPathFactory, target: str):
    place = tmp_path_factory.mktemp("readonly")
    for folder in takewhile(lambda folder: not folder.stat().st_mode & 0o001, (place, *place.parents)):
        folder.chmod(0o755)  # so that anybody gets here
    place.chmod(0o555)
    (source := place.parent / f"{target}-source.gguf").write_bytes(builtin_path("micro-llama").read_bytes())
    with pytest.raises(PermissionError) as caught, without_privileges():
        convert(source, place / target)
    assert caught.value.filename == str(place / target)
    assert "Permission denied; nothing was written" in str(caught.value)
    place.chmod(0o755)
    assert names(place) == []


MEASURED = """
import sys
from pathlib import Path
from llorch.convert import convert

def peak():  # ru_maxrss would count what the parent had before it started this process
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

before = peak()
convert(sys.argv[1], sys.argv[2])
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="NOT RUN: no /proc here to measure with")
@pytest.mark.parametrize("back", [False, True], ids=["to a file", "to a folder"])
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path, back: bool):
    width, rows, n_layers = 512, 4000, 40  # 8 MB the largest, 190 MB in all
    rng = np.random.default_rng(1)
    tensors = {"model.embed_tokens.weight": rng.normal(size=(rows, width)), "model.norm.weight": np.ones(width)}
    for layer in range(n_layers):
        block = f"model.layers.{layer}."
        tensors |= {
            block + name: np.ones(width) for name in ("input_layernorm.weight", "post_attention_layernorm.weight")
        }
        tensors |= {f"{block}self_attn.{part}_proj.weight": rng.normal(size=(width, width)) for part in "qkvo"}
        tensors |= {f"{block}mlp.{part}_proj.weight": rng.normal(size=(128, width)) for part in ("gate", "up")}
        tensors[block + "mlp.down_proj.weight"] = rng.normal(size=(width, 128))
    source = write_folder(
        tmp_path / "a", {name: array.astype(np.float32) for name, array in tensors.items()}, hidden_size=width,
        intermediate_size=128, num_hidden_layers=n_layers, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=rows, tie_word_embeddings=True,
    )  # fmt: skip
    target = tmp_path / "m.gguf"
    if back:
        convert(source, target)
        source, target = target, tmp_path / "b"
    command = [sys.executable, "-c", MEASURED, str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY, timeout=300)
    grown = int(done.stdout)
    assert grown < 40e6, f"{grown / 1e6:.0f} MB"
