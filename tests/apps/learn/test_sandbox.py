"""Whatever a learner's code does ends at most the process that checks it."""

import inspect
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.refusals import assert_tells

from llorch.apps.learn import folder
from llorch.apps.learn.calling import own_frames
from llorch.apps.learn.lessons import BY_NUMBER
from llorch.apps.learn.sandbox import Outcome, _Printed, outcomes

HEAD = "import ctypes, os, signal, sys, time\nimport numpy as np\n\n\ndef rms_norm(x, weight, eps):\n"
RIGHT = "    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps)) * weight\n"


def written(place: Path, body: str, *, head: str = HEAD) -> Path:
    (place / "l01_rms_norm.py").write_text(head + body)
    return place


def checked(place: Path, *numbers: str, seconds: float = 2) -> tuple[list[Outcome], list[str]]:
    said: list[str] = []
    return list(outcomes(str(place), numbers or ("01", "03"), seconds=seconds, progress=said.append)), said


def said_of(outcome: Outcome) -> str:
    return outcome.record["fault"]


@pytest.mark.nightly_cases(but=["EOFError", "MemoryError"])
@pytest.mark.parametrize(
    ("body", "facts"),
    [  # as a learner may write it
        pytest.param("while True:\n        pass\n", ["rms_norm", "TookTooLong", "2 s"], id="loop"),
        pytest.param("time.sleep(10_000)\n", ["rms_norm", "TookTooLong", "2 s"], id="sleep"),
        pytest.param(
            "signal.signal(signal.SIGALRM, signal.SIG_IGN)\n    while True:\n        pass\n",
            ["2 s", "interrupted"], id="loop without alarm", marks=pytest.mark.nightly,
        ),
        pytest.param("os._exit(3)\n", ["process", "exit status 3"], id="exit"),
        pytest.param("ctypes.string_at(0)\n", ["process", "SIGSEGV"], id="crash"),
        pytest.param("sys.exit(3)\n", ["rms_norm", "SystemExit: 3"], id="SystemExit"),
        pytest.param("return np.ones(1 << 37)\n", ["rms_norm", "MemoryError: Unable to allocate"], id="MemoryError"),
        pytest.param("return rms_norm(x, weight, eps)\n", ["rms_norm", "RecursionError"], id="RecursionError"),
        pytest.param("return input()\n", ["rms_norm", "EOFError"], id="EOFError"),
        pytest.param("raise KeyboardInterrupt\n", ["check", "KeyboardInterrupt", "--full"], id="KeyboardInterrupt"),
    ],
)  # fmt: skip
def test_code_that_never_ends_well_fails_its_lesson_alone(tmp_path: Path, body: str, facts: list[str]):
    found, _ = checked(written(tmp_path, f"    {body}"))
    assert [outcome.label for outcome in found] == ["FAIL", "BORROWED"]
    assert_tells(said_of(found[0]).splitlines()[0], *facts)


def test_traceback_shows_the_lines_of_the_learner(tmp_path: Path):
    found, _ = checked(written(tmp_path, "    return helper(x)\n\n\ndef helper(x):\n    return np.dot(x, x, x, x)\n"))
    raised, *frames = said_of(found[0]).split("\n")
    assert raised.startswith("rms_norm: raised TypeError: ")
    file = tmp_path / "l01_rms_norm.py"
    own = [f"{file}:6  return helper(x)", f"{file}:10  return np.dot(x, x, x, x)"]
    assert [frame.strip() for frame in frames] == own
    assert "llorch/apps/learn/guard.py" in found[0].traceback


def test_a_long_traceback_keeps_its_first_and_last_lines():
    def descend(depth: int) -> float:
        return descend(depth - 1) if depth else 1 / 0

    with pytest.raises(ZeroDivisionError) as raised:
        descend(8)
    first, *calls = own_frames(raised.value)
    assert first.endswith("descend(8)")
    assert calls == [calls[0], calls[0], "(4 more)", calls[0], calls[0], calls[0]]


@pytest.mark.nightly_cases("import numpy as np\\ndef *", "while True:\\n    pass\\n-TookTooLong: -None")
@pytest.mark.parametrize(
    ("head", "raised", "line"),
    [
        ("import numpy as np\ndef rms_norm(x, weight, eps)\n", "SyntaxError: ", "2  def rms_norm(x, weight, eps)"),
        ("import numpy as np\nnp.nothing\n", "AttributeError: ", "2  np.nothing"),
        ("exit(3)\n", "SystemExit: 3", "1  exit(3)"),
        ("while True:\n    pass\n", "TookTooLong: ", None),
    ],
)
def test_file_that_cannot_be_imported_fails_its_lesson_alone(tmp_path: Path, head: str, raised: str, line: str | None):
    (tmp_path / "l02_qkv.py").write_text("from l01_rms_norm import rms_norm\n")  # gets the reference
    found, _ = checked(written(tmp_path, "", head=head), "01", "02")
    assert [outcome.label for outcome in found] == ["FAIL", "BORROWED"]
    assert f"rms_norm: raised {raised}" in said_of(found[0])
    assert line is None or said_of(found[0]).endswith(f"l01_rms_norm.py:{line}")


def test_time_of_llorch_before_an_import_is_not_that_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    forget = folder._forget_earlier
    monkeypatch.setattr(folder, "_forget_earlier", lambda: (time.sleep(1.2), forget()))
    (found,) = checked(written(tmp_path, "", head="exit(3)\n"), "01", seconds=1)[0]
    assert_tells(said_of(found), "rms_norm", "SystemExit", 3)


def test_a_process_that_ends_while_files_are_imported_fails_every_lesson(tmp_path: Path):
    found, _ = checked(written(tmp_path, "", head="import os\nos._exit(4)\n"))
    assert [outcome.lesson for outcome in found] == ["01", "03"]
    for outcome in found:
        assert_tells(said_of(outcome), "process", "imported", "exit status 4")


def test_a_crash_says_the_learners_line_and_is_that_of_its_lesson(tmp_path: Path):
    written(tmp_path, RIGHT)
    (tmp_path / "l03_kv_cache.py").write_text(
        "import ctypes\n\n\ndef append(past_k, past_v, k, v):\n    ctypes.string_at(0)\n"
    )
    found, said = checked(tmp_path, seconds=10)
    assert [outcome.label for outcome in found] == ["PASS", "FAIL"]
    assert {line.split(":")[0] for line in said} == {"03 prints"}
    assert f'03 prints:   File "{tmp_path}/l03_kv_cache.py", line 5 in append' in said
    assert not [line for line in said if "guard.py" in line]


@pytest.mark.parametrize("name", ["a b", "\xfc", "\u4f60", "\U0001f98a"])
def test_a_frame_below_a_folder_beyond_ascii_is_known(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.apps.learn.calling._LIBRARY_FOLDERS", (tmp_path / name,))
    escaped = str(tmp_path / name / "guard.py").encode("ascii", "backslashreplace")
    said: list[str] = []
    printed = _Printed("03", said.append)
    printed.write(b'  File "' + escaped + b'", line 41 in call\n  File "l03.py", line 5 in append\n')
    assert said == ['03 prints:   File "l03.py", line 5 in append']


def test_start_of_printed_text_is_shown_with_the_lesson(tmp_path: Path):
    flood = "    for n in range(10_000):\n        print(n, '\\x1b[2J')\n    os.write(1, b'unended')\n    1 / 0\n"
    found, said = checked(written(tmp_path, flood))
    assert [outcome.label for outcome in found] == ["FAIL", "BORROWED"]
    assert said[:2] == ["01 prints: 0 \\x1b[2J", "01 prints: 1 \\x1b[2J"]
    assert (len(said), said[-1]) == (21, "01 prints: (9981 more lines)")


def test_right_code_passes_and_what_it_started_ends_with_it(tmp_path: Path):
    thread = "import threading\nthreading.Thread(target=time.sleep, args=(10_000,)).start()\n\n\ndef rms_norm("
    (found,), _ = checked(written(tmp_path, RIGHT, head=HEAD.replace("def rms_norm(", thread)), "01", seconds=10)
    assert (found.label, said_of(found), found.record["compared"] > 100) == ("PASS", "", True)


def test_a_new_python_checks_where_a_copy_of_this_process_is_not_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    body = "    print(1)\n    signal.signal(signal.SIGALRM, signal.SIG_IGN)\n    while True:\n        pass\n"
    found, said = checked(written(tmp_path, body), "01", seconds=1)
    assert_tells(said_of(found[0]), "1 s", "interrupted")  # by the clock that both processes see
    assert said == ["01 prints: 1"]


@pytest.mark.slow
def test_every_lesson_has_its_own_time(tmp_path: Path):
    head = "import time\nimport numpy as np\ncalls = []\n\n\n"
    wait = "    time.sleep(0 if calls else 3)\n    calls.append(1)\n"
    written(tmp_path, wait + RIGHT, head=f"{head}def rms_norm(x, weight, eps):\n")
    swiglu = f"{head}def swiglu(gate, up):\n{wait}    return gate\n"
    (tmp_path / "l06_swiglu.py").write_text(swiglu)
    found, _ = checked(tmp_path, "01", "06", seconds=5)
    assert [(outcome.label, said_of(outcome)) for outcome in found] == [("PASS", ""), ("FAIL", "")]


@pytest.mark.parametrize(("seconds", "advice"), [("0.02", "--seconds"), ("9", "loop")])
def test_slow_calls_are_distinguished_from_an_endless_loop(tmp_path: Path, seconds: str, advice: str):
    found, _ = checked(written(tmp_path, f"    time.sleep({seconds})\n{RIGHT}"), "01", seconds=1)
    assert_tells(said_of(found[0]), "rms_norm", "TookTooLong", advice)
    assert ("loop" in said_of(found[0])) is (advice == "loop")


@pytest.mark.parametrize(
    ("body", "facts"),
    [
        ("    while True:\n        pass\n    yield 1\n", ["TookTooLong", "0.3 s"]),
        ("    yield from iter(lambda: 1, 2)\n", [1, "step"]),
    ],
)
def test_a_stream_takes_its_time_while_it_is_read(tmp_path: Path, body: str, facts: list[object]):
    generate = next(exercise for exercise in BY_NUMBER["12"].parts if exercise.streams)
    names = ", ".join(inspect.signature(generate.reference).parameters)
    (tmp_path / "l12_generation.py").write_text(f"def {generate.name}({names}):\n{body}")
    found, _ = checked(tmp_path, "12", seconds=0.3)
    assert found[0].label == "FAIL"
    assert_tells(said_of(found[0]), generate.name, *facts)


@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: only Linux ends a process with the one that started it")
def test_endless_loop_ends_with_the_waiting_process(tmp_path: Path):
    loop = "    print(os.getpid())\n    signal.signal(signal.SIGALRM, signal.SIG_IGN)\n    while True:\n        pass\n"
    command = [sys.executable, "-m", "llorch", "learn", "check", "01", "--impl", str(written(tmp_path, loop))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        looping = int(process.stderr.readline().split()[-1])
        process.kill()
    for _ in range(50):
        if not Path(f"/proc/{looping}").exists() or " Z " in Path(f"/proc/{looping}/stat").read_text():
            return
        time.sleep(0.1)
    os.kill(looping, 9)
    pytest.fail("it runs on")
