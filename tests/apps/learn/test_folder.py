"""Files of a learner: what is written in them, what they import from each other, and what has changed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch.apps.learn.check import check, check_functions
from llorch.apps.learn.checks import forward
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.folder import read_folder
from llorch.apps.learn.lessons import BY_NUMBER, PARTS, lesson_fingerprint, sources
from llorch.apps.learn.progress import LearnerProgress, Standing
from llorch.apps.learn.sandbox import Outcome
from llorch.stages.comparison import FAIL, PASS

NORM = "l01_rms_norm"
STUB = 'def {0}(*given):\n    """To do."""\n    raise NotImplementedError\n'
RIGHT = """import numpy as np
def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight
"""


def label(folder: Path, number: str) -> str:
    return check(BY_NUMBER[number], Implementation(str(folder), read_folder(folder))).label


@pytest.fixture(autouse=True)
def one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "models_of", lambda lesson: ["micro-llama"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / f"{NORM}.py").write_text(RIGHT)
    return tmp_path


def test_a_part_may_be_a_function_a_lambda_or_a_class(folder: Path):
    assert label(folder, "01") == PASS
    (folder / f"{NORM}.py").write_text(RIGHT.replace("def rms_norm", "def norm") + "rms_norm = lambda **w: norm(**w)\n")
    assert label(folder, "01") == PASS
    (folder / f"{NORM}.py").write_text(
        "class _Norm:\n    def __call__(self, x, weight, eps):\n"
        "        return x / (((x * x).mean(-1, keepdims=True)) + eps) ** 0.5 * weight\nrms_norm = _Norm()\n"
    )
    assert label(folder, "01") == PASS


@pytest.mark.parametrize("stub", [STUB, "async " + STUB], ids=["def", "async"])
def test_unwritten_function_is_the_reference_where_it_is_imported(folder: Path, stub: str):
    (folder / f"{NORM}.py").write_text(stub.format("rms_norm"))
    (folder / "l07_block.py").write_text(f"from {NORM} import rms_norm\ndef block(**given):\n    return rms_norm\n")
    written = read_folder(folder)
    assert set(written) == {"block"}
    assert written["block"]() is PARTS["rms_norm"].reference


def test_files_may_import_each_other(folder: Path):
    (folder / f"{NORM}.py").write_text("from l06_swiglu import swiglu\n" + STUB.format("rms_norm"))
    (folder / "l06_swiglu.py").write_text(
        f"from {NORM} import rms_norm\n" + STUB.format("feed_forward") + "def swiglu(gate, up):\n    return rms_norm\n"
    )
    written = read_folder(folder)
    assert set(written) == {"swiglu"}
    assert written["swiglu"](0, 0) is PARTS["rms_norm"].reference


@pytest.mark.parametrize(
    "text", ["def rms_norm(:\n", "import no_such_module\n", "import sys; sys.exit(2)\n", "1 / 0\n", "\0"],
    ids=["syntax", "import", "exit", "raise", "nul"],
)  # fmt: skip
def test_a_file_that_cannot_be_imported_fails_its_own_lesson_only(folder: Path, text: str):
    (folder / f"{NORM}.py").write_text(text)
    (folder / "l06_swiglu.py").write_text(
        f"from {NORM} import rms_norm\ndef swiglu(gate, up):\n    return gate / (1 + 2.718281828459045 ** -gate) * up\n"
    )
    implementation = Implementation(str(folder), read_folder(folder))
    assert "raised" in check(BY_NUMBER["01"], implementation).fault
    assert not check(BY_NUMBER["06"], implementation).fault


def test_an_edit_is_seen_also_in_other_files_of_the_folder(folder: Path):
    (folder / f"{NORM}.py").write_text(
        "import numpy as np\nfrom halves import half\n" + RIGHT.replace("+ eps)", "+ half(eps))")
    )
    halves = folder / "halves.py"
    for text, wanted in (("0.5", FAIL), ("1.0", PASS), ("2.0", FAIL)):  # as long as each other, and as old
        halves.write_text(f"def half(x):\n    return np_float(x * {text})\nnp_float = float\n")
        assert label(folder, "01") == wanted


def test_two_folders_have_files_of_one_name(tmp_path: Path):
    for name, value in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "helper.py").write_text(f"value = {value}\n")
        (tmp_path / name / f"{NORM}.py").write_text("import helper\ndef rms_norm(**given):\n    return helper.value\n")
    assert [read_folder(tmp_path / name)["rms_norm"]() for name in "abab"] == [1, 2, 1, 2]


def test_what_a_file_prints_does_not_matter(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / f"{NORM}.py").write_text(RIGHT.replace("    return", "    print(x.shape)\n    return"))
    assert label(folder, "01") == PASS
    assert capsys.readouterr().out


def test_learner_file_does_not_hide_a_standard_module(folder: Path):
    (folder / "fractions.py").write_text("1 / 0\n")
    (folder / f"{NORM}.py").write_text("from fractions import Fraction\n" + RIGHT)
    assert read_folder(folder)["rms_norm"](x=np.ones(2), weight=1, eps=0).tolist() == [1, 1]


BLOCK = """
from l01b_rope import rope
from l04_attention_scores import attention_scores
from llorch.apps.learn.exercises import forward

def block(x, w, cos, sin, past_k, past_v, head_dim, eps):
    y, k, v = forward.block(x, w, cos, sin, past_k, past_v, head_dim, eps)
    rows = k[:, -len(x):].swapaxes(0, 1)
    turned = attention_scores(q=rope(rows, cos, sin), k=k)
    return y, k.astype(turned.dtype), v
"""
ROPE = "import numpy as np\ndef rope(x, cos, sin):\n    return x * cos[:, :1, None]{cast}\n"
SCORES = "import numpy as np\ndef attention_scores(q, k):\n    return (q.swapaxes(0, 1) @ k.swapaxes(1, 2)) / {root}\n"


@pytest.mark.parametrize(
    ("rope", "scores", "blamed"),
    [
        (ROPE.format(cast=""), SCORES.format(root="np.float32(4)"), "rope: "),
        (ROPE.format(cast=".astype(x.dtype)"), SCORES.format(root="np.float64(4)"), "attention_scores: "),
        (ROPE.format(cast=".astype(x.dtype)"), SCORES.format(root="np.float32(4)"), "block: "),
    ],
    ids=["rope", "scores", "block"],
)
def test_wrong_dtype_of_a_block_is_that_of_the_part_that_made_it(folder: Path, rope: str, scores: str, blamed: str):
    (folder / "l01b_rope.py").write_text(rope)
    (folder / "l04_attention_scores.py").write_text(scores)
    block = BLOCK.replace("turned.dtype", "float") if blamed == "block: " else BLOCK
    (folder / "l07_block.py").write_text(block)
    found = check(BY_NUMBER["07"], Implementation("folder", read_folder(folder)))
    assert found.fault.partition("expected")[0] == blamed


def test_wrong_dtype_of_a_block_of_a_notebook_is_that_of_the_part_that_made_it():
    cells: dict[str, Any] = {}  # one namespace, as in a notebook
    exec(ROPE.format(cast="") + SCORES.format(root="np.float32(4)"), cells)
    exec("\n".join(line for line in BLOCK.splitlines() if not line.startswith("from l0")), cells)
    found = check_functions("07", block=cells["block"])
    assert found.fault.partition("expected")[0] == "rope: "


NORM_LESSON, ROPE_LESSON = BY_NUMBER["01"], BY_NUMBER["01b"]


@pytest.fixture
def progress(tmp_path: Path) -> LearnerProgress:
    return LearnerProgress(tmp_path, pytest.fail)


def write(progress: LearnerProgress, text: str, module: str = "l01_rms_norm") -> None:
    (progress.folder / f"{module}.py").write_text(text)


def note(progress: LearnerProgress, word: str, number: str = "01") -> Standing:
    progress.note(Outcome(number, word, "", {}))
    return progress.read()[number]


def test_versions_of_the_code_are_counted_and_the_one_that_passed_is_known(progress: LearnerProgress):
    write(progress, "a")
    assert note(progress, "FAIL").attempts == 1
    assert note(progress, "FAIL").attempts == 1  # the same code
    write(progress, "b")
    passed = note(progress, "PASS")
    assert (passed.attempts, passed.status) == (2, "PASS")
    assert passed.passed == lesson_fingerprint(progress.folder, NORM_LESSON)
    assert progress.is_passed(NORM_LESSON, passed)
    write(progress, "c")
    assert (progress.label(NORM_LESSON, passed), progress.is_passed(NORM_LESSON, passed)) == ("CHANGED", False)
    assert note(progress, "BORROWED").attempts == 2  # nothing was judged


def test_code_of_a_lesson_is_its_file_and_what_that_imports(progress: LearnerProgress):
    write(progress, "from helper import f\nimport numpy", "l01b_rope")
    write(progress, "def g():\n    import deeper, l01b_rope", "helper")
    write(progress, "not Python", "deeper")
    before = lesson_fingerprint(progress.folder, ROPE_LESSON)
    assert [path.name for path in sources(progress.folder, ROPE_LESSON)] == ["deeper.py", "helper.py", "l01b_rope.py"]
    write(progress, "not Python either", "deeper")
    write(progress, "", "l02_qkv")
    assert lesson_fingerprint(progress.folder, ROPE_LESSON) != before
    assert sources(progress.folder, NORM_LESSON) == []


def test_concurrent_writes_of_another_process_are_kept(progress: LearnerProgress):
    note(progress, "FAIL", "01b")
    with LearnerProgress(progress.folder, pytest.fail).changed(NORM_LESSON) as standing:
        standing.hints["rms_norm"] = 2
    known = progress.read()
    assert (known["01"].hints, known["01b"].status) == ({"rms_norm": 2}, "FAIL")
    assert [path.name for path in progress.path.parent.iterdir()] == ["progress.json"]


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", '{"version": 2, "lessons": {}}', '{"version": 1}', '{"version": 1, "lessons": {"99": {}}}',
        '{"version": 1, "lessons": {"01": 3}}', '{"version": 1, "lessons": {"01": {"hints": {"rms_norm": "x"}}}}',
        '{"version": 1, "lessons": {"01": {"status": "GOOD"}}}', '{"version": 1, "lessons": {"01": {"other": 1}}}',
        '{"version": 1, "lessons": {"01": {"attempts": -1}}}',
    ],
)  # fmt: skip
def test_unusable_progress_file_is_reported_and_kept(tmp_path: Path, text: str):
    said: list[str] = []
    progress = LearnerProgress(tmp_path, said.append)
    for name in ("progress.json.bak", "progress.json.2.bak"):
        progress.path.parent.mkdir(exist_ok=True)
        progress.path.write_text(text)
        assert progress.read()["01"] == Standing()
        assert str(progress.path) in said[-1]
        assert name in said[-1]
        assert (progress.path.parent / name).read_text() == text
    assert note(progress, "PASS").status == "PASS"


def test_progress_failed_write_keeps_the_old_file(progress: LearnerProgress, monkeypatch: pytest.MonkeyPatch):
    note(progress, "FAIL")
    before = progress.path.read_bytes()
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        note(progress, "PASS")
    assert progress.path.read_bytes() == before
    assert json.loads(before)["lessons"].keys() == {"01"}
