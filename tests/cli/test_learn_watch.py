"""`llorch learn`, as somebody at a terminal uses it: a file is saved, keys are pressed."""

import codecs
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from select import select

import pytest
from helpers.interrupts import heed_interrupts

from llorch.apps.learn.lessons import BY_NUMBER, hints_of, stub_of
from llorch.cli.learn.watch import KEYS

NORM = BY_NUMBER["01"]
RIGHT = f"import numpy as np\n{hints_of(NORM)['rms_norm'][-1]}"
RIGHT_LINEAR = f"import numpy as np\n{hints_of(BY_NUMBER['02'])['linear'][-1]}"
MAIN = "from llorch.cli import main; main(prog_name='llorch')"
STARTS = {
    "watchfiles": MAIN,
    "polling": f"import sys; sys.modules['watchfiles'] = None; {MAIN}",
    "late": "import time, watchfiles as w; now = w.watch; w.watch = lambda *a, **b: time.sleep(4) or now(*a, **b); "
    + MAIN,
}


class Terminal:
    """A process at a terminal of its own."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.ours, theirs = pty.openpty()
        self.theirs, self.text, self.decoder = theirs, "", codecs.getincrementaldecoder("utf-8")()
        environment = os.environ | {"LLORCH_IMPL": str(folder), "TERM": "dumb", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
            preexec_fn=heed_interrupts,
        )  # fmt: skip

    def wait_for(self, *words: str, seconds: float = 120) -> str:
        """Return what came until all the words were there; it is forgotten then."""
        end = time.monotonic() + seconds
        while not all(word in self.text for word in words):
            assert time.monotonic() < end, self.text
            if select([self.ours], [], [], 0.1)[0]:
                self.text += self.decoder.decode(os.read(self.ours, 1 << 16))
        seen, self.text = self.text, ""
        return seen

    def press(self, key: str) -> None:
        os.write(self.ours, key.encode())

    def is_cooked(self) -> bool:
        """Tell whether the terminal shows what is typed, a line at a time."""
        flags = termios.tcgetattr(self.theirs)[3]
        return bool(flags & termios.ECHO and flags & termios.ICANON)


def write(folder: Path, text: str, module: str = "l01_rms_norm") -> None:
    (folder / f"{module}.py").write_text(text)


@pytest.fixture(params=["watchfiles"])
def terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    """A terminal at which `llorch learn` has been started in one of `STARTS`."""
    write(tmp_path, stub_of(NORM))
    if request.param != "polling":
        pytest.importorskip("watchfiles", reason="NOT RUN: watchfiles is not installed")
    at = Terminal([sys.executable, "-c", STARTS[request.param], "learn", "--seconds", "2"], tmp_path)
    try:
        at.wait_for(KEYS)
        yield at
    finally:
        at.process.kill()
        at.process.wait()
        os.close(at.ours)
        os.close(at.theirs)


def assert_ends(terminal: Terminal, code: int) -> None:
    assert terminal.process.wait(60) == code
    assert terminal.is_cooked()


@pytest.mark.slow
@pytest.mark.parametrize("terminal", ["watchfiles"], indirect=True)
def test_what_is_saved_is_checked_whatever_it_does(terminal: Terminal, tmp_path: Path):
    for text, said in (
        ("import os\ndef rms_norm(x, weight, eps):\n    os._exit(3)\n", "exit status 3"),
        ("import time\ndef rms_norm(x, weight, eps):\n    while True: time.sleep(1)\n", "TookTooLong"),
        ("def rms_norm(x, weight, eps:\n", "SyntaxError"),
        ("def rms_norm(x, weight, eps):\n    return x\n", "first wrong number"),
    ):
        write(tmp_path, text)
        assert "PASS" not in terminal.wait_for("checkpoint_01_rms_norm   FAIL", said, "llorch learn hint 01")
    write(tmp_path, "import l01_rms_norm\n", "l02_qkv")
    terminal.wait_for("checkpoint_02_qkv   BORROWED")
    write(tmp_path, "import l01_rms_norm\n", "l08_logits")
    terminal.wait_for("checkpoint_08_logits   BORROWED")
    write(tmp_path, f"from l01_rms_norm import rms_norm\n{RIGHT_LINEAR}", "l02_qkv")
    assert "qkv" in terminal.wait_for("checkpoint_02_qkv   BORROWED", "\n").partition("BORROWED")[2]
    write(tmp_path, RIGHT)
    seen = terminal.wait_for("checkpoint_01_rms_norm   PASS", "checkpoint_02_qkv   BORROWED", "1 PASS, 1 BORROWED")
    assert "08_logits" not in seen  # nothing of it is written
    terminal.process.send_signal(signal.SIGINT)
    assert_ends(terminal, 0)


@pytest.mark.nightly_cases("polling")
@pytest.mark.parametrize("terminal", ["polling", "late"], indirect=True)
def test_a_save_is_seen_however_the_folder_is_watched(terminal: Terminal, tmp_path: Path):
    write(tmp_path, "def rms_norm(x, weight, eps:\n")
    terminal.wait_for("checkpoint_01_rms_norm   FAIL", "SyntaxError")
    write(tmp_path, f"{stub_of(NORM)}\n")
    terminal.wait_for("checkpoint_01_rms_norm   BORROWED")
    terminal.press("q")
    assert_ends(terminal, 0)


@pytest.mark.parametrize("terminal", ["watchfiles"], indirect=True)
def test_keys_do_what_the_verbs_do(terminal: Terminal, tmp_path: Path):
    write(tmp_path, f"{stub_of(NORM)}\n")
    terminal.wait_for("checkpoint_01_rms_norm   BORROWED")
    for key, said in (
        ("o", "01 rms"), ("h", "rms_norm, hint 1 of 3"), ("h", "rms_norm, hint 2 of 3"), ("l", "20_merge_export"[3:]),
        ("s", "def rms_norm"), ("?", ""), ("x", "l01_rms_norm.py.bak"), ("n", "01b rope, "), ("c", " BORROWED"),
    ):  # fmt: skip
        terminal.press(key)
        terminal.wait_for(said)
    terminal.process.send_signal(signal.SIGINT)  # all lessons are being checked
    assert_ends(terminal, 0)


@pytest.mark.nightly_cases("late")
@pytest.mark.parametrize("terminal", STARTS, indirect=True)
def test_a_terminal_is_put_back_when_the_loop_is_ended(terminal: Terminal):
    assert not terminal.is_cooked()
    terminal.process.terminate()
    assert_ends(terminal, 128 + signal.SIGTERM)
