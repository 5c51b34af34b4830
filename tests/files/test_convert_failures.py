"""What a conversion looks at before and after it writes, what it leaves when it fails, and the memory it takes."""

import errno
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from builders.tiny_models import random_tensors, with_biases, write_folder
from builders.whole_folders import write_whole_folder
from helpers.command_line import REPOSITORY
from helpers.refusals import refuses

from llorch.files import convert as conversion
from llorch.files import open_gguf, open_weights
from llorch.files.convert import convert
from llorch.files.export import gguf_size
from llorch.files.quant import GGMLType
from llorch.runtime.builtin import builtin_path
from llorch.runtime.errors import FormatError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("target", ["m.gguf", "folder"])
def test_convert_interrupted_removes_partial_files(tmp_path: Path, target: str):
    def interrupt(line: str) -> None:
        assert any(name.startswith(f".{target}.") for name in names(tmp_path))
        if line.startswith("20/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(builtin_path("story"), tmp_path / target, report=interrupt)
    assert names(tmp_path) == []


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the system refuse to write more than this to a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("target", ["m.gguf", "folder"])
@pytest.mark.parametrize("room", [100, 20_000, 200_000, 1_000_000])
@pytest.mark.usefixtures("no_bytecode")
def test_convert_failed_write_keeps_the_old_target(tmp_path: Path, target: str, room: int):
    convert(builtin_path("micro-qwen3"), tmp_path / target)
    with refuses(OSError, os.strerror(errno.EFBIG)) as caught, largest_file(room):
        convert(builtin_path("micro-llama"), tmp_path / target, force=True)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / target))
    assert names(tmp_path) == [target]
    assert open_weights(tmp_path / target).config.family == "qwen3"


def test_a_target_that_cannot_fit_is_refused_before_it_is_written(tmp_path: Path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    rows, width = 1 << 24, 8
    while rows * width * 4 < 2 * free:
        width *= 2
    source = sparse_model(tmp_path / "a", rows, width, 8)
    needed = f"{gguf_size(open_weights(source).config, GGMLType.F32) / 1e9:.2f} GB"
    with refuses(OSError, needed, where=tmp_path / "m.gguf") as caught:
        convert(source, tmp_path / "m.gguf")
    assert caught.value.errno == errno.ENOSPC
    told, left = (float(number) for number in re.findall(r"([0-9.]+) GB", str(caught.value)))
    assert left < told
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize(("total", "number"), [(9000, errno.ENOSPC), (0, errno.ENOENT)], ids=["9000", "0"])
def test_little_room_is_told_in_its_unit_and_a_file_system_without_any_by_the_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, number: int
):
    target = tmp_path / "m.gguf" if total else Path("/proc/m.gguf")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=total, free=total // 3))
    needed = f"{gguf_size(open_weights(builtin_path('micro-llama')).config, GGMLType.F32) / 1e3:.0f} kB"
    with refuses(OSError, *((needed, "3 kB") if total else ()), where=target) as caught:
        convert(builtin_path("micro-llama"), target)
    assert caught.value.errno == number


def sparse_model(folder: Path, rows: int, width: int, inter: int, n_layers: int = 1) -> Path:
    """A model of zeros that takes no room on the disk; each tensor ends with a one, so that it is no half download."""
    shapes = {"model.embed_tokens.weight": (rows, width), "model.norm.weight": (width,)}
    for block in (f"model.layers.{layer}." for layer in range(n_layers)):
        shapes |= {block + name: (width,) for name in ("input_layernorm.weight", "post_attention_layernorm.weight")}
        shapes |= {f"{block}self_attn.{part}_proj.weight": (width, width) for part in "qkvo"}
        shapes |= {f"{block}mlp.{part}_proj.weight": (inter, width) for part in ("gate", "up")}
        shapes[block + "mlp.down_proj.weight"] = (width, inter)
    write_folder(
        folder, {}, hidden_size=width, intermediate_size=inter, num_hidden_layers=n_layers, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=rows, tie_word_embeddings=True,
    )  # fmt: skip
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text, largest = json.dumps(header).encode(), resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if resource.RLIM_INFINITY != largest < end:
        pytest.skip(f"NOT RUN: needs a sparse file of {end} bytes, and files may have {largest}")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for row in header.values():
            file.seek(8 + len(text) + row["data_offsets"][1] - 4)
            file.write(np.float32(1).tobytes())
    return folder


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
    for folder in (place, *place.parents):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(0o755)  # so that anybody gets here
    place.chmod(0o555)
    (source := place.parent / f"{target}-source.gguf").write_bytes(builtin_path("micro-llama").read_bytes())
    with pytest.raises(PermissionError) as caught, without_privileges():
        convert(source, place / target)
    assert caught.value.filename == str(place / target)
    assert caught.value.errno == errno.EACCES
    place.chmod(0o755)
    assert names(place) == []


MEASURED = """
import sys
from pathlib import Path
from llorch.files.convert import convert

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
    source = sparse_model(tmp_path / "a", rows=4000, width=256, inter=128, n_layers=40)  # 4 MB the largest, 60 in all
    target = tmp_path / "m.gguf"
    if back:
        convert(source, target)
        source, target = target, tmp_path / "b"
    command = [sys.executable, "-c", MEASURED, str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY, timeout=300)
    grown = int(done.stdout)
    assert grown < 25e6, f"{grown / 1e6:.0f} MB"


def test_a_norm_beyond_float16_makes_a_folder_of_float32(tmp_path: Path):
    tensors = random_tensors("llama")
    tensors["model.norm.weight"][3] = 70000
    convert(write_folder(tmp_path / "a", tensors), tmp_path / "m.gguf", ggml_type=GGMLType.F16)
    assert convert(tmp_path / "m.gguf", tmp_path / "b").ggml_type is GGMLType.F32
    assert open_weights(tmp_path / "b")["final_norm"][3] == 70000


def test_a_llama_model_keeps_the_bias_of_its_attention(tmp_path: Path):
    source = write_folder(tmp_path / "a", with_biases(random_tensors("llama")), attention_bias=True)
    convert(source, tmp_path / "m.gguf")
    back = open_weights(tmp_path / "m.gguf")
    assert back["layers.1.o_bias"].tolist() == list(range(32))
    assert back["layers.1.q_bias"].tolist() == list(range(32))


def test_settings_of_sampling_that_are_not_used_are_not_taken_along(tmp_path: Path):
    source = write_whole_folder(tmp_path / "a", "llama-bpe")
    settings = source / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"do_sample": False}))
    convert(source, tmp_path / "m.gguf")
    with open_gguf(tmp_path / "m.gguf") as file:
        assert not [key for key in file.metadata if key.startswith("general.sampling.")]
    convert(tmp_path / "m.gguf", tmp_path / "b")
    assert "do_sample" not in json.loads((tmp_path / "b" / "generation_config.json").read_text())
    assert json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())["model_max_length"] == 512
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (260, [261, 259])


def test_every_setting_of_sampling_goes_there_and_back(tmp_path: Path):
    from gguf import Keys

    settings = {"temperature": 0.75, "top_k": 20, "top_p": 0.875, "min_p": 0.0625, "repetition_penalty": 1.125}
    names = ("SAMPLING_TEMP", "SAMPLING_TOP_K", "SAMPLING_TOP_P", "SAMPLING_MIN_P", "SAMPLING_PENALTY_REPEAT")
    source = write_whole_folder(tmp_path / "a", "llama-bpe")
    (source / "generation_config.json").write_text(json.dumps({"do_sample": True, **settings}))
    convert(source, tmp_path / "m.gguf")
    with open_gguf(tmp_path / "m.gguf") as file:
        assert [file.metadata[getattr(Keys.General, name)] for name in names] == list(settings.values())
    convert(tmp_path / "m.gguf", tmp_path / "b")
    back = json.loads((tmp_path / "b" / "generation_config.json").read_text())
    assert {key: back.get(key) for key in settings} == settings


def test_a_file_of_another_configuration_is_refused_after_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = conversion.read_back

    def changed(path: Path, *arguments: Any) -> None:
        content = path.read_bytes()
        before, after = (np.float32(theta).tobytes() for theta in (10000.0, 20000.0))
        at = content.index(before, content.index(b"rope.freq_base"))
        path.write_bytes(content[:at] + after + content[at + 4 :])
        right(path, *arguments)

    source = write_folder(tmp_path / "a", random_tensors("llama"))
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "read_back", changed)
        with refuses("Inconsistent", "rope_theta", 20000.0, 10000.0):
            convert(source, tmp_path / "m.gguf")
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("target", ["m.gguf", "folder"])
def test_written_file_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str):
    source = write_folder(tmp_path / "a", random_tensors("llama"))
    if target == "folder":
        source = convert(source, tmp_path / "b.gguf").target
    before = names(tmp_path)
    monkeypatch.setattr("llorch.files.output_paths.open_weights", lambda path: opened_once(path, source))
    with refuses("Truncated"):
        convert(source, tmp_path / target)
    assert names(tmp_path) == before


def opened_once(path: Path, source: Path) -> object:
    if path != source:
        raise FormatError("Truncated", "", path=path)
    return open_weights(path)


def test_a_tokenizer_that_gives_other_ids_is_refused_after_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = conversion.translate_vocabulary

    def wrong(*parts: object, **options: object) -> object:
        made = right(*parts, **options)  # type: ignore[arg-type]
        made.tokenizer["model"]["merges"].clear()
        return made

    monkeypatch.setattr(conversion, "translate_vocabulary", wrong)
    with refuses("Unsupported", "encode", where="tokenizer"):
        convert(builtin_path("story"), tmp_path / "folder")
    assert names(tmp_path) == []


def test_a_folder_inside_of_the_target_is_no_file_of_a_model(tmp_path: Path):
    convert(builtin_path("micro-llama"), tmp_path / "folder")
    (tmp_path / "folder" / "more.safetensors").mkdir()
    with refuses(FileExistsError, "more.safetensors", where=tmp_path / "folder"):
        convert(builtin_path("micro-qwen3"), tmp_path / "folder", force=True)
