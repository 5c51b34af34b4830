import subprocess
import sys
from pathlib import Path

import pytest

from llorch.memory import available_memory, keep_freed_memory


def test_the_setting_can_be_made_twice_and_arrays_still_work():
    keep_freed_memory()
    keep_freed_memory()


def test_a_library_without_mallopt_is_left_alone():
    code = (
        "import ctypes\n"
        "def without(name):\n    raise OSError('no such library')\n"
        "ctypes.CDLL = without\n"
        "from llorch.memory import keep_freed_memory\n"
        "keep_freed_memory()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_some_memory_is_available():
    assert available_memory() > 1e6


def test_without_linux_all_memory_counts(monkeypatch: pytest.MonkeyPatch):
    def missing(self: Path) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", missing)
    assert available_memory() > 1e8
