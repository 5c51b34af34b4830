"""What is unpacked of a source distribution: what tests ask for, and nothing else."""

import io
import tarfile
from pathlib import Path

import pytest
from fetch_vocabularies import WANTED, unpack
from refusals import refuses

TREE = "llama_cpp_python-1.2.3/vendor/llama.cpp"
MODULES = ("conversion/__init__.py", "conversion/qwen.py", "gguf-py/gguf/__init__.py", "gguf-py/gguf/vocab.py")
OTHERS = ("convert_hf_to_gguf.py", "gguf-py/gguf/py.typed", "gguf-py/gguf/scripts/gguf_dump.py", "models/other.gguf")


def packed(folder: Path, *, without: str = "") -> Path:
    path = folder / "llama_cpp_python-1.2.3.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in {*WANTED, *MODULES, *OTHERS} - {without}:
            member = tarfile.TarInfo(f"{TREE}/{name}")
            member.size = len(name)
            archive.addfile(member, io.BytesIO(name.encode()))
    return path


def test_models_lie_at_the_top_and_the_converters_two_packages_as_in_the_tree(tmp_path: Path):
    files = unpack(packed(tmp_path), tmp_path / "folder")
    wanted = {name.removeprefix("models/"): name for name in (*WANTED, *MODULES)}
    assert {str(path.relative_to(tmp_path / "folder")): path.read_text() for path in files} == wanted
    assert {path for path in (tmp_path / "folder").rglob("*") if path.is_file()} == set(files)


@pytest.mark.parametrize("name", ["models/templates/Qwen-Qwen3-0.6B.jinja", "gguf-py/gguf/__init__.py"])
def test_a_distribution_that_lacks_one_is_refused_before_anything_is_written(name: str, tmp_path: Path):
    archive = packed(tmp_path, without=name)
    with refuses(SystemExit, archive.name, f"{TREE}/{name}"):
        unpack(archive, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
