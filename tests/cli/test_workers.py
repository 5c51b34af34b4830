"""Jobs in processes of their own: what they give, and what becomes of errors, of the dead and of what is abandoned."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from llorch.cli.workers import Workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: no process is started elsewhere")

WORK = 300  # seconds; a test that waits for its end finds that the work was finished


def results(n_processes: int, *jobs: Callable[[], int]) -> list[int]:
    with Workers(dict(enumerate(jobs)), n_processes) as workers:
        return [workers.result(at) for at in range(len(jobs))]


@pytest.mark.parametrize(("n_processes", "n_jobs", "ahead"), [(1, 5, 0), (2, 1, 0), (2, 5, 2), (9, 3, 3)])
def test_results_come_in_order_from_as_many_processes_as_are_allowed_and_have_work(n_processes, n_jobs, ahead):
    jobs = [lambda i=i: (time.sleep(0.05 * (n_jobs - i)), i * 100_000_000 + os.getpid())[1] for i in range(n_jobs)]
    numbers, pids = zip(*(divmod(made, 100_000_000) for made in results(n_processes, *jobs)), strict=True)
    assert numbers == tuple(range(n_jobs))
    assert {*pids} - {os.getpid()} == ({*pids} if ahead else set())
    assert len({*pids}) == max(ahead, 1)


@pytest.mark.parametrize("ends", [lambda: 1 // 0, lambda: os._exit(1)], ids=["fails", "dies"])
def test_unfinished_jobs_run_in_the_caller(ends):
    here = os.getpid()
    assert results(2, lambda: 3 if os.getpid() == here else ends(), lambda: 4, lambda: 5) == [3, 4, 5]


def test_an_error_is_raised_here_and_hides_no_other_result():
    with Workers({"wrong": lambda: int("x"), "right": lambda: 4}, 2) as workers:
        with pytest.raises(ValueError, match="invalid literal") as caught:
            workers.result("wrong")
        assert workers.result("right") == 4
    assert caught.traceback[-1].name == "<lambda>"  # by which exit codes tell whose error it is


def test_workers_exit_ends_pending_work_and_removes_its_files(tmp_path: Path):
    def slow() -> int:
        with TemporaryDirectory(dir=tmp_path) as folder:
            Path(folder, "entered").touch()
            time.sleep(WORK)
        tmp_path.joinpath("finished").touch()
        return 0

    with Workers({1: slow, 2: slow}, 2):
        while len(list(tmp_path.glob("*/entered"))) < 2:
            time.sleep(0.01)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("times", [1, 2, 1000])
def test_process_that_ignores_termination_is_signalled_again_and_killed(tmp_path, monkeypatch, times):
    """As where the signal comes below a callback of a library in C: what it raises is printed there, and goes on."""
    monkeypatch.setattr("llorch.cli.workers.GRACE", 0.5)

    def deaf() -> int:
        for n in range(times):
            with suppress(SystemExit):
                tmp_path.joinpath(f"{os.getpid()} {n}").touch()
                time.sleep(WORK)
                tmp_path.joinpath("finished").touch()
        return 0

    with Workers({1: deaf, 2: deaf}, 2):
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
    assert not tmp_path.joinpath("finished").exists()
