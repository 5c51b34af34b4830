import ctypes
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.refusals import assert_cli_refuses

from llorch import engines
from llorch.runtime import memory
from llorch.runtime.memory import available_memory
from llorch.runtime.threads import VARIABLES, limit_threads, n_requested

RESIDENT = """
import resource
from pathlib import Path
import numpy as np
from llorch.runtime.memory import keep_freed_memory, return_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
"""
KEPT = """
keep_freed_memory()
keep_freed_memory()
size = 1 << 26  # bytes, twice as many as the C library would keep of itself
array = np.ones(size, np.uint8)
held = resident()
del array
assert held - resident() < size / 2, (held, resident())
assert int(np.full(size, 3, np.uint8).sum()) == 3 * size
"""
HOLES = """
keep_freed_memory()  # or arrays of this size lie outside of the heap
arrays = [np.ones(size, np.uint8) for size in [1 << 20, 1 << 12] * 64]
held = resident()
del arrays[::2]
assert held - resident() < 1 << 25, (held, resident())
return_freed_memory()
assert held - resident() > 1 << 25, (held, resident())
assert all(array.all() for array in arrays)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="NOT RUN: the C library has no mallopt")
def test_freed_memory_is_kept_for_the_next_array_after_the_setting_was_made_twice():
    subprocess.run([sys.executable, "-c", RESIDENT + KEPT], check=True)  # a process whose heap no other test has filled


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="NOT RUN: the C library has no malloc_trim")
def test_freed_memory_between_arrays_in_use_is_returned():
    subprocess.run([sys.executable, "-c", RESIDENT + HOLES], check=True)


def test_library_without_these_functions_is_unchanged():
    code = (
        "import ctypes\n"
        "def without(name):\n    raise OSError('no such library')\n"
        "ctypes.CDLL = without\n"
        "from llorch.runtime.memory import keep_freed_memory, return_freed_memory\n"
        "keep_freed_memory()\n"
        "return_freed_memory()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_some_memory_is_available():
    assert available_memory() > 1e6


def test_without_linux_all_memory_counts(monkeypatch: pytest.MonkeyPatch):
    def missing(self: Path) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", missing)
    assert available_memory() > 1e8


GB = 10**9
V2 = {"memory.max": "{limit}", "memory.current": "700", "memory.stat": "anon 500\nactive_file 40\ninactive_file 60\n"}
V1 = {
    "memory.limit_in_bytes": "{limit}", "memory.usage_in_bytes": "700",
    "memory.stat": "inactive_file 1\ntotal_active_file 40\ntotal_inactive_file 60\n",
}  # fmt: skip
GROUPS = {  # what this process reads as its groups, and the limits along the way
    "none": ("0::/\n", "", V2, {}, 4 * GB),
    "version 2": ("0::/a/b\n", "", V2, {"a/b": "900"}, 300),
    "version 2, one around it": ("0::/a/b\n", "", V2, {"a/b": "max", "a": "800"}, 200),
    "version 2, in a container": ("0::/\n", "", V2, {"": "1000"}, 400),
    "version 1": ("3:cpu:/a\n4:memory,x:/a\n0::/\n", "memory", V1, {"a": "900", "": str(2**63 - 4096)}, 300),
    "version 1, in a container": ("4:memory:/docker/0123\n", "memory", V1, {"": "900"}, 300),
    "no limit": ("0::/a\n", "", V2, {"a": "max"}, 4 * GB),
}


@pytest.mark.parametrize("name", GROUPS)
def test_available_memory_of_a_container_counts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines, mount, files, limits, left = GROUPS[name]
    write(tmp_path / "proc", {"meminfo": f"MemAvailable: {4 * GB // 1024} kB\n", "self/cgroup": lines})
    for group, limit in limits.items():
        texts = {file: text.replace("{limit}", limit) for file, text in files.items()}
        write(tmp_path / "sys/fs/cgroup" / mount / group, texts)
    monkeypatch.setattr(memory, "_ROOT", tmp_path)
    assert available_memory() == pytest.approx(left, rel=1e-6)


def write(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_address_space_limit_counts_and_a_file_beyond_it_is_refused_in_one_line(tmp_path: Path):
    big = tmp_path / "model.gguf"
    with big.open("wb") as file:
        file.truncate(GB)  # no bytes on the disk
    code = f"""
import resource
from llorch.runtime.memory import address_space_left, available_memory
from llorch.cli import main
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + {GB // 2},) * 2)
assert abs(available_memory() - {GB // 2}) < 5e7 and abs(address_space_left() - {GB // 2}) < 5e7
main(["inspect", {str(big)!r}], prog_name="llorch")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert_cli_refuses(done, 4, "1.00 GB", "ulimit -v", where=big)
    assert re.search(r"\b0\.\d\d GB\b", done.stderr)
    assert done.stderr.count("\n") == 1


@pytest.fixture(autouse=True)
def no_thread_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_thread_option_overrides_the_environment(monkeypatch: pytest.MonkeyPatch):
    assert n_requested() is None
    monkeypatch.setenv("OMP_NUM_THREADS", "all")
    assert n_requested() is None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert n_requested() == 3
    with limit_threads(2):
        with limit_threads(1):
            assert n_requested() == 1
        assert n_requested() == 2
    assert n_requested() == 3


@pytest.mark.parametrize(("n_requested", "n_expected"), [(None, 2), (5, 5)])
def test_engine_gets_the_requested_threads(
    n_requested: int | None, n_expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    found: list[Any] = []
    monkeypatch.setattr(engines, "EngineInChild", lambda *_args, n_threads, **_how: found.append(n_threads))
    monkeypatch.setattr(engines, "find_spec", lambda name: True)
    with limit_threads(2):
        engines.open_engine("llamacpp", tmp_path, n_threads=n_requested)
    engines.open_engine("llamacpp", tmp_path, n_threads=n_requested)
    assert found == [n_expected, n_requested]
