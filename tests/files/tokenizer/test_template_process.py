"""The life of the process that renders chat templates: started, ended, started again, never left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.command_line import REPOSITORY
from helpers.refusals import assert_tells, refuses

from llorch.files.tokenizer import template_process
from llorch.files.tokenizer.template_process import TemplateLimits, TemplateProcess

HELLO = {"source": "hello", "variables": {}}
ENDLESS = {"source": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "variables": {}}
HUNGRY = {"source": "{{ 'a' * 2000000000 }}", "variables": {}}


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[TemplateProcess]:
    """With time that suits a busy machine; a test whose template takes too much of it asks for less."""
    process = TemplateProcess(TemplateLimits(seconds=getattr(request, "param", 30.0)))
    yield process
    process.stop()


def assert_stopped(answer: dict[str, str], *facts: object) -> None:
    assert (answer.keys(), answer["code"]) == ({"code", "message"}, "TemplateBudget")
    assert_tells(answer["message"], *facts)


hasty = pytest.mark.parametrize("process", [0.3], indirect=True)


def pid_of(process: TemplateProcess) -> int:
    assert process.ask(HELLO) == {"text": "hello"}
    assert process.pid is not None
    return process.pid


def process_exists(pid: int) -> bool:
    """Tell whether a process exists; one that nobody waited for (a zombie) does."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def running(pid: int) -> bool:
    """Tell whether a process runs; a zombie, which an orphan stays in some containers, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends_within(seconds: float, pid: int) -> bool:
    last = time.monotonic() + seconds
    while running(pid) and time.monotonic() < last:
        time.sleep(0.05)
    return not running(pid)


def script(text: str) -> subprocess.CompletedProcess[str]:
    start = (
        "import os, signal, threading, time\nfrom llorch.files.tokenizer.template_process import RESIDENT as process\n"
    )
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{start}HELLO = {HELLO}\nENDLESS = {ENDLESS}\n{text}"],
        capture_output=True, text=True, check=False, cwd=REPOSITORY,
    )  # fmt: skip


def test_one_process_renders_everything_and_waits_as_long_as_need_be(process: TemplateProcess):
    assert process.pid is None
    first = pid_of(process)
    time.sleep(0.5)
    assert pid_of(process) == first


@hasty
@pytest.mark.parametrize(("request_", "limit"), [(ENDLESS, "0.3 s"), (HUNGRY, "512 MiB")])
def test_a_breach_ends_the_process_and_the_next_request_has_a_new_one(
    request_: dict[str, object], limit: str, process: TemplateProcess
):
    first = pid_of(process)
    assert_stopped(process.ask(request_), limit)
    assert (process.pid, process_exists(first)) == (None, False)
    assert pid_of(process) != first


def test_a_process_that_ended_while_idle_is_replaced(process: TemplateProcess):
    first = pid_of(process)
    os.kill(first, signal.SIGKILL)
    assert ends_within(30, first)
    assert pid_of(process) != first
    assert not process_exists(first)


def test_a_process_that_ends_in_some_other_way_is_told(process: TemplateProcess):
    killer = threading.Timer(0.1, os.kill, (pid_of(process), signal.SIGSEGV))
    killer.start()
    assert_stopped(process.ask(ENDLESS), -signal.SIGSEGV)
    killer.join()


def test_template_process_stop_ends_the_child(process: TemplateProcess):
    first = pid_of(process)
    process.stop()
    process.stop()
    assert not process_exists(first)


def test_threads_get_their_own_answers(process: TemplateProcess):
    def ask(number: int) -> bool:
        request = {"source": "{{ x }}" * (number % 5), "variables": {"x": f"{number}," * number}}
        return process.ask(request) == {"text": f"{number}," * number * (number % 5)}

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(400)))


def test_an_interrupted_request_does_not_answer_the_next(process: TemplateProcess):
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def ask() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        process.ask(ENDLESS)

    pid_of(process)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            ask()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert process.pid is None
    assert process.ask(HELLO) == {"text": "hello"}


def test_ctrl_c_is_not_for_the_process(process: TemplateProcess):
    first = pid_of(process)
    os.kill(first, signal.SIGINT)
    time.sleep(0.1)
    assert pid_of(process) == first


@hasty
def test_a_caller_that_ignores_the_alarm_does_not_switch_it_off(process: TemplateProcess):
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])
    try:
        assert_stopped(process.ask(ENDLESS), "0.3 s")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
        signal.signal(signal.SIGPROF, before)


@hasty
def test_time_in_which_the_process_waits_for_a_processor_does_not_count(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
):
    wait = "import time; ready = template_worker.answer; slow = lambda *a, **k: time.sleep(0.6) or ready(*a, **k); "
    start = wait + "template_worker.answer = slow; template_worker.main()"
    monkeypatch.setattr(template_process, "_BOOT", template_process._BOOT.replace("template_worker.main()", start))
    assert process.ask(HELLO) == {"text": "hello"}
    assert_stopped(process.ask(ENDLESS), "0.3 s")


@hasty
def test_time_is_limited_where_alarms_and_limits_of_memory_are_missing(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
):
    without = "import signal, sys; sys.modules['resource'] = None; del signal.setitimer; "
    monkeypatch.setattr(template_process, "_BOOT", without + template_process._BOOT)
    monkeypatch.setattr(template_process, "_OUT_OF_TIME", 1)
    assert process.ask(HELLO) == {"text": "hello"}
    assert_stopped(process.ask(ENDLESS), "0.3 s")
    second = pid_of(process)
    time.sleep(0.5)
    assert pid_of(process) == second  # time between requests does not count


def test_a_process_that_cannot_start_is_an_error_with_its_command(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(template_process, "_BOOT", "raise SystemExit(9)")
    with refuses(ChildProcessError, "chat templates", "status 9", f"{sys.executable} -I -S"):
        process.ask(HELLO)
    assert process.pid is None


def test_template_process_ends_when_python_exits():
    done = script("process.ask(HELLO)\nprint(process.pid)\n")
    assert not process_exists(int(done.stdout))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "end",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        "threading.Thread(target=process.ask, args=(ENDLESS,), daemon=True).start(); time.sleep(0.2)\n"
        "os.kill(os.getpid(), signal.SIGKILL)",
    ],
    ids=["killed", "killed while a template runs"],
)
def test_the_process_ends_when_the_one_that_asks_is_killed(end: str):
    done = script(f"process.ask(HELLO)\nprint(process.pid, flush=True)\n{end}\n")
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    assert ends_within(30, int(done.stdout))


def test_a_fork_has_a_process_of_its_own():
    done = script("""
process.ask(HELLO)
first = process.pid
child = os.fork()
assert process.ask(HELLO) == {"text": "hello"}
if child:
    assert os.waitpid(child, 0)[1] == 0
    assert process.ask(HELLO) == {"text": "hello"}
assert (process.pid == first) == bool(child)
""")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_process_sees_no_files_of_the_caller(process: TemplateProcess, tmp_path_factory: pytest.TempPathFactory):
    with (tmp_path_factory.mktemp("x") / "held").open("w") as held:
        pid = pid_of(process)
        if not os.path.isdir(f"/proc/{pid}/fd"):
            pytest.skip("NOT RUN: no /proc")
        targets = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        assert held.name not in targets
        assert len(targets) == 3
