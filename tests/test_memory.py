import subprocess
import sys

from llorch.memory import keep_freed_memory


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
