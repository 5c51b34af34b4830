import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.refusals import assert_tells, refuses

from llorch.ops.compiled import library as cpu_library
from llorch.ops.compiled.library import library


def test_the_kernels_are_built_on_this_machine():
    assert library() is not None


def test_missing_compiler_warns_once_and_continues(monkeypatch, caplog):
    monkeypatch.setattr(cpu_library, "find_compiler", lambda: None)
    cpu_library.library.cache_clear()
    try:
        assert [library(), library()] == [None, None]
    finally:
        cpu_library.library.cache_clear()
    (line,) = caplog.messages
    assert_tells(line, "CPU", "compiler")


PACKING = "llorch_pack_codes"  # the function of packing.c


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_failing_compiler_error_is_quoted(tmp_path):
    compiler = script(tmp_path / "cc", "echo 'cc: error: no -fopenmp here' >&2\nexit 1")
    with refuses(cpu_library.NotBuilt, f"{compiler}: cc: error: no -fopenmp here"):
        cpu_library.build([compiler], tmp_path / "made.so")


def test_a_compiler_named_by_the_environment_comes_first(tmp_path, monkeypatch):
    compiler = script(tmp_path / "my cc", "")
    monkeypatch.setenv("CC", f"'{compiler}' gcc -pipe")
    assert cpu_library.find_compiler() == [compiler, "gcc", "-pipe"]
    monkeypatch.setenv("CC", "nowhere gcc")
    assert cpu_library.find_compiler() == [shutil.which("cc")]


@pytest.fixture(scope="module")
def library_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A library of one source, as a compiler makes it on this machine, in little time."""
    command, path = cpu_library.find_compiler(), tmp_path_factory.mktemp("made") / "made.so"
    assert command is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_library, "FLAGS", ("-O0", *cpu_library.FLAGS[1:]))
        patch.setattr(cpu_library, "SOURCES", [path for path in cpu_library.SOURCES if path.name == "packing.c"])
        cpu_library.build(command, path)
    return path.read_bytes()


@pytest.fixture
def n_linked(library_bytes, tmp_path, monkeypatch) -> Callable[[], int]:
    """Put a compiler that has its result ready behind another command, and provide a cache of its own.

    Returns:
        A function that tells how often a library was linked.
    """
    log, ready = tmp_path / "log", tmp_path / "ready.so"
    ready.write_bytes(library_bytes)
    answer = f'case "$*" in *--version*) exec "$@" ;; *" -c "*) exit ;; esac\necho >> "{log}"'
    copy = f'while [ "$1" != -o ]; do shift; done\ncp "{ready}" "$2"'
    wrapper = script(tmp_path / "ccache", f"{answer}\n{copy}")
    monkeypatch.setenv("CC", f"{wrapper} cc")
    monkeypatch.setattr(cpu_library, "SIGNATURES", {PACKING: cpu_library.SIGNATURES[PACKING]})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda: len(log.read_text()) if log.exists() else 0


def load_library() -> ctypes.CDLL | None:
    """The library as a new process gets it."""
    return cpu_library.library.__wrapped__()


@pytest.mark.slow
def test_built_library_is_cached_for_the_next_process(n_linked, tmp_path):
    assert [load_library() is None, load_library() is None, n_linked()] == [False, False, 1]
    (folder,) = (tmp_path / "cache").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.suffix for path in folder.iterdir()] == [".so"]


@pytest.mark.parametrize("damage", [lambda data: data[:4096], lambda data: b"", lambda data: data[:-40] + data[-39:]])
def test_damaged_library_is_rebuilt(damage, n_linked, tmp_path):
    load_library()
    (file,) = (tmp_path / "cache" / "llorch").iterdir()
    whole = file.read_bytes()
    file.unlink()  # it is mapped
    file.write_bytes(damage(whole))
    assert load_library() is not None
    assert n_linked() == 2
    assert cpu_library.is_sealed(file)


def test_library_name_depends_on_source_compiler_and_processor(n_linked, monkeypatch):
    command = cpu_library.find_compiler() or []
    names = {cpu_library.identity(command), cpu_library.identity([*command, "-g"])}
    monkeypatch.setattr(cpu_library, "_processor", lambda: ["another"])
    names.add(cpu_library.identity(command))
    monkeypatch.setattr(cpu_library, "FLAGS", (*cpu_library.FLAGS, "-g"))
    assert len({*names, cpu_library.identity(command)}) == 4


@pytest.mark.parametrize("obstacle", ["others may write to it", "no folder", "not loadable"])
def test_every_process_builds_without_a_private_cache_folder(obstacle, n_linked, tmp_path, monkeypatch):
    folder = tmp_path / "cache" / "llorch"
    if obstacle == "no folder":
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    else:
        folder.mkdir(parents=True)
        folder.chmod(0o777 if obstacle == "others may write to it" else 0o700)
    if obstacle == "not loadable":
        refuse_to_load_from(folder, monkeypatch)
    assert [load_library() is None, load_library() is None] == [False, False]
    assert n_linked() == (4 if obstacle == "not loadable" else 2)
    assert not folder.exists() or [*folder.iterdir()] == []


def test_unloadable_library_warns_and_continues(n_linked, monkeypatch, caplog):
    refuse_to_load_from(Path("/"), monkeypatch)
    assert load_library() is None
    (line,) = caplog.messages
    assert_tells(line, "CPU")
    assert line.endswith("failed to map segment from shared object")


def refuse_to_load_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system mounted noexec does."""
    load = ctypes.CDLL

    def refusing(name: str) -> ctypes.CDLL:
        if Path(name).is_relative_to(folder):
            raise OSError(f"{name}: failed to map segment from shared object")
        return load(name)

    monkeypatch.setattr(cpu_library.ctypes, "CDLL", refusing)
