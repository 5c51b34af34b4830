"""Exit codes and error lines."""

import errno
import io
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import click
import numpy as np
import pytest
from click.testing import CliRunner
from helpers.command_line import REPOSITORY, invoke
from helpers.refusals import assert_cli_refuses, assert_tells

from llorch.cli import main
from llorch.cli.outcome import error_line, reported
from llorch.cli.output import to_json
from llorch.cli.tables import print_table, table
from llorch.files.quant import GGMLType, decode
from llorch.ops.sampling import SamplingSettings
from llorch.runtime.builtin import EVERY, builtin_path
from llorch.runtime.errors import CheckpointMismatch, EngineDied, FormatError, Guard, GuardFailed, MissingExtra

OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS)


def outcome(error: BaseException, **options: bool) -> int:
    with pytest.raises(click.exceptions.Exit) as caught, reported(**options):
        raise error
    return caught.value.exit_code


def made_by(wrong: Callable[[], object]) -> BaseException:
    try:
        wrong()
    except Exception as error:
        return error
    raise AssertionError("expected an error")


def errors() -> list[tuple[BaseException, int]]:
    return [
        (CheckpointMismatch("l0.q_rope: error 1e-2"), 1),
        (FormatError("Truncated", "cut", path="a.gguf"), 2),
        (made_by(lambda: SamplingSettings(temperature=-1.0)), 2),
        (made_by(lambda: decode(np.zeros(4, np.uint8), GGMLType.F32, (2,))), 70),
        (made_by(lambda: np.zeros(3).reshape(2, 2)), 70),
        (made_by(lambda: np.linalg.inv(np.zeros(3))), 70),
        (made_by(lambda: int("one")), 70),
        *((GuardFailed(guard, "expected", source="d"), 10 + n) for n, guard in enumerate(get_args(Guard))),
        (PermissionError(13, "Permission denied", "a.gguf"), 2),
        (OSError(errno.ENOENT, os.strerror(errno.ENOENT), "a.gguf"), 3),
        (MissingExtra("golden", "llama_cpp"), 3),
        (ModuleNotFoundError("no such module", name="rich.console"), 3),
        (ModuleNotFoundError("no such module", name="none_of_ours"), 70),
        (EngineDied("llamacpp: SIGSEGV in trace"), 3),
        (MemoryError(), 4),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 4),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), 4),
        (IndexError("list index out of range"), 70),
        (KeyboardInterrupt(), 130),
        *((OSError(number, os.strerror(number), "a.gguf"), 74) for number in OF_DISKS),
    ]


@pytest.mark.parametrize("place", range(24 + len(OF_DISKS)))
def test_each_class_of_error_has_its_exit_code_and_ends_in_one_line(place: int, capsys: pytest.CaptureFixture[str]):
    error, code = errors()[place]
    assert outcome(error) == code
    assert capsys.readouterr().err.splitlines()[-1].startswith("llorch: ")


def test_only_a_bug_prints_a_traceback_unasked(capsys: pytest.CaptureFixture[str]):
    printed = {}
    for error, code in errors():
        outcome(error)
        printed[code] = "Traceback" in capsys.readouterr().err
    assert [code for code, shown in printed.items() if shown] == [70]


def test_an_error_of_the_system_names_the_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError) as caught:
        (tmp_path / "absent").read_bytes()
    assert error_line(caught.value) == f"llorch: {tmp_path}/absent: {os.strerror(errno.ENOENT)}"


def test_an_error_line_cannot_move_the_cursor_of_a_terminal():
    assert error_line(ValueError("a\nb \x1b[2J")) == "llorch: a b \\x1b[2J"


BUS_ERROR = """
import os, sys
from llorch.cli.outcome import reported
from llorch.files.mapped import MappedFile
with reported():
    view = MappedFile(sys.argv[1]).view(0, 8192)
    os.truncate(sys.argv[1], 0)
    view.sum()
"""


@pytest.mark.skipif(not hasattr(signal, "SIGBUS"), reason="NOT RUN: no SIGBUS here")
def test_a_file_that_is_cut_during_a_product_ends_the_process_with_the_place(tmp_path: Path):
    path = tmp_path / "cut"
    path.write_bytes(bytes(8192))
    command = [sys.executable, "-c", BUS_ERROR, path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == -signal.SIGBUS
    assert done.stderr.startswith("Fatal Python error: Bus error\n")


def test_click_keeps_its_own_ways_to_end(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(click.exceptions.Exit) as caught, reported():
        raise click.UsageError("no")
    assert (caught.value.exit_code, "no" in capsys.readouterr().err) == (2, True)
    with pytest.raises(click.Abort), reported():
        raise click.Abort


def test_json_has_null_where_a_number_is_not_finite():
    assert to_json({"a": [1.5, float("nan")], "b": (float("inf"), "x")}) == '{"a": [1.5, null], "b": [null, "x"]}'


def shell(command: str) -> tuple[int, str]:
    """The exit code and stderr of a command line."""
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, cwd=REPOSITORY, text=True, stdin=subprocess.DEVNULL
    )
    return done.returncode, done.stderr


VERIFY = "verify micro-llama3"  # costs most


@pytest.mark.nightly_cases(but=["inspect story-2>&-", "run story Once -n 2->&-"])
@pytest.mark.parametrize(
    ("words", "closed"),
    [
        *((words, how) for words in ("inspect story", "run story Once -n 2") for how in (">&-", "2>&-", ">&- 2>&-")),
        *(pytest.param(VERIFY, how, marks=pytest.mark.nightly) for how in (">&-", "2>&-", ">&- 2>&-")),
    ],
)
def test_a_stream_that_the_caller_closed_is_no_error(words: str, closed: str):
    assert shell(f"{sys.executable} -m llorch {words} {closed}") == (0, "")


@pytest.mark.nightly_cases(but=["-run story Once -n 2", "1-inspect story"])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="NOT RUN: no /dev/full")
@pytest.mark.parametrize(
    ("buffered", "words"),
    [
        *((how, words) for words in ("inspect story", "run story Once -n 2") for how in ("", "1")),
        ("", VERIFY),
        pytest.param("1", VERIFY, marks=pytest.mark.nightly),
    ],
)
def test_output_to_a_full_disk_is_one_line(buffered: str, words: str):
    ended = shell(f"PYTHONUNBUFFERED={buffered} {sys.executable} -m llorch {words} >/dev/full")
    assert (ended[0], ended[1].count("\n")) == (74, 1)
    assert ended[1].startswith(f"llorch: stdout: {os.strerror(errno.ENOSPC)}; ")


@pytest.mark.parametrize("name", [None, "model.gguf"])
def test_too_many_open_files_say_how_to_raise_the_limit(name: str | None):
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE), *([] if name is None else [name]))
    line = error_line(error)
    assert line.startswith(f"llorch: {name or 'open'}: {os.strerror(errno.EMFILE)}; ")
    assert_tells(line, "ulimit -n")


@pytest.mark.parametrize("code", OF_DISKS)
def test_a_disk_that_fails_under_stdout_is_told_from_one_under_a_file(code: int):
    reason = os.strerror(code)
    assert error_line(OSError(code, reason)).startswith(f"llorch: stdout: {reason}; ")
    assert error_line(OSError(code, reason, "a.gguf")) == f"llorch: a.gguf: {reason}"
    assert "stdout" not in error_line(OSError(code, f"rank 1: {reason}"))


@pytest.mark.nightly_cases("inspect story-0", "serve story -v --port 0-74")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="NOT RUN: no /dev/full")
@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("serve story -v --port 0", 74),  # it cannot say that it is ready
        ("inspect nowhere.gguf", 3),
        ("serve --port 99999", 2),
        ("inspect story", 0),  # which has nothing to say there
    ],
)
def test_a_full_stderr_changes_no_exit_code(words: str, code: int):
    assert shell(f"timeout 60 {sys.executable} -m llorch {words} 2>/dev/full") == (code, "")


@pytest.mark.parametrize("name", ["model.gguf", "folder"])
def test_a_model_that_does_not_fit_on_the_disk_is_one_line(name: str, tmp_path: Path):
    # Files may have so many blocks of 512 or 1024 bytes.
    ended = shell(f"ulimit -f 18; {sys.executable} -m llorch convert micro-llama '{tmp_path}/{name}'")
    assert (ended[0], ended[1].count("\n")) == (74, 1)
    assert ended[1].startswith(f"llorch: {tmp_path}/{name}: {os.strerror(errno.EFBIG)}; ")
    assert list(tmp_path.iterdir()) == []


def test_a_narrow_terminal_loses_no_column():
    from rich.console import Console

    rows = table("first column", "second column", ">verdict")
    rows.add_row("one", "two", "PASS")
    out = Console(width=20, file=io.StringIO())
    print_table(out, rows)
    assert out.file.getvalue().splitlines()[-1].split() == ["one", "two", "PASS"]  # type: ignore[attr-defined]
    assert out.width == 20


def test_a_character_that_the_locale_lacks_is_escaped_on_stdout():
    result = CliRunner(charset="ascii").invoke(main, ["run", "story", "x", "-t", "50", "-n", "40"])
    assert (result.exit_code, result.exception) == (0, None)
    assert "\\ufffd" in result.stdout


WITHOUT_PACKAGES = (sys.executable, "-S")  # a clone that is not installed


def test_clone_without_its_packages_tells_the_command_that_installs_them():
    command = [*WITHOUT_PACKAGES, "-m", "llorch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY, check=False)
    assert_cli_refuses(done, 3, "click", "pip install -c constraints.txt -e .")
    assert done.stderr.count("\n") == 1


def test_python_without_the_packages_tells_the_command_that_installs_them():
    code = "import llorch\ntry:\n    llorch.load\nexcept llorch.MissingExtra as error:\n    print(error)"
    command = [*WITHOUT_PACKAGES, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY, check=True)
    assert_tells(done.stdout, "pip install -c constraints.txt -e .")


@pytest.mark.parametrize("module", ["gguf", "jaxtyping", "numpy", "regex", "tokenizers"])
def test_package_that_a_verb_lacks_is_told_in_one_line(module: str):
    code = f"import sys; sys.modules[{module!r}] = None; from llorch.cli import main; main(['run', 'story', 'x'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert_cli_refuses(done, 3, module, "pip install -c constraints.txt -e .")


TABLE = tomllib.loads(Path(__file__).with_name("messages.toml").read_text(encoding="utf-8"))["message"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with files that cannot be used."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cut.gguf").write_bytes(builtin_path("micro-llama").read_bytes()[:3000])
    (tmp_path / "text.gguf").write_text("this is no model")
    (tmp_path / "model.bin").write_bytes(b"\x80\x04")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "text.txt").write_text("Once upon a time")
    for name in ("empty.gguf", "empty.txt"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize("message", TABLE, ids=lambda message: message["command"])
def test_command_that_cannot_be_done_ends_with_the_line_of_the_table(message: dict, folder: Path):
    files = sorted(folder.iterdir())
    result = invoke(*shlex.split(message["command"].format(folder=folder, models="")))
    assert (result.exit_code, result.stdout) == (message["exit_code"], ""), result.exception
    line = message["line"].format(folder=folder, models=", ".join(EVERY))
    assert result.stderr.splitlines()[-1] == line
    assert "Traceback" not in result.stderr
    assert sorted(folder.iterdir()) == files


def test_no_command_stands_twice_in_the_table():
    commands = [message["command"] for message in TABLE]
    assert len(commands) == len({*commands})
