import json
from pathlib import Path

import pytest

from llorch.apps.learn.lessons import BY_NUMBER, lesson_fingerprint, sources
from llorch.apps.learn.progress import LearnerProgress, Standing
from llorch.apps.learn.sandbox import Outcome

NORM, ROPE = BY_NUMBER["01"], BY_NUMBER["01b"]


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
    assert (passed.attempts, passed.passed, passed.status) == (2, lesson_fingerprint(progress.folder, NORM), "PASS")
    assert progress.is_passed(NORM, passed)
    write(progress, "c")
    assert (progress.word(NORM, passed), progress.is_passed(NORM, passed)) == ("CHANGED", False)
    assert note(progress, "BORROWED").attempts == 2  # nothing was judged


def test_code_of_a_lesson_is_its_file_and_what_that_imports(progress: LearnerProgress):
    write(progress, "from helper import f\nimport numpy", "l01b_rope")
    write(progress, "def g():\n    import deeper, l01b_rope", "helper")
    write(progress, "not Python", "deeper")
    before = lesson_fingerprint(progress.folder, ROPE)
    assert [path.name for path in sources(progress.folder, ROPE)] == ["deeper.py", "helper.py", "l01b_rope.py"]
    write(progress, "not Python either", "deeper")
    write(progress, "", "l02_qkv")
    assert lesson_fingerprint(progress.folder, ROPE) != before
    assert sources(progress.folder, NORM) == []


def test_what_another_process_wrote_meanwhile_is_kept(progress: LearnerProgress):
    note(progress, "FAIL", "01b")
    with LearnerProgress(progress.folder, pytest.fail).changed(NORM) as standing:
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
def test_a_file_that_cannot_be_used_is_said_and_kept(tmp_path: Path, text: str):
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
