"""Build and load the C files of this folder for the processor of this machine.

Building takes some seconds with any compiler that supports OpenMP. The library is cached in a private folder of the
user, under a hash of sources, compiler and processor. If there is no private folder, or loading from it fails, each
process builds in a temporary folder. If that fails, too, llorch warns once and uses the functions of NumPy and torch.
The loops share torch's OpenMP threads, because both load one OpenMP library.
"""

import ctypes
import logging
import os
import platform
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from pathlib import Path

from llorch.runtime.threads import end_waiting_threads, n_cores
from llorch.runtime.waiting import loaded_asleep
from llorch.runtime.worker import run

logger = logging.getLogger(__name__)

SOURCES = tuple(
    Path(__file__).with_name(f"{name}.c")
    for name in ("products", "vec_dot", "fixed", "layer", "attention", "block", "delta", "packing")
)
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")
BUILD = 120.0  # seconds that compiling a file may take
_CPU_LINES = ("vendor", "cpu family", "model", "stepping", "flags", "CPU ", "Features")  # prefixes in /proc/cpuinfo

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_MATRIX = (_INT, _POINTER, _POINTER, _POINTER, _POINTER, _INT)  # as `CpuQuantisedLinear.matrix_of` returns
SIGNATURES = {
    "llorch_product": (_INT, (*_MATRIX, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG)),
    "llorch_fixed_product": (_INT, (*_MATRIX, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG)),
    "llorch_decode": (None, (*_MATRIX, _POINTER, _LONG, _LONG, _LONG)),
    "llorch_vec_dot": (_INT, (_POINTER, _POINTER, _POINTER, _LONG, _POINTER, _LONG, _POINTER, *[_LONG] * 3)),
    "llorch_rms_norm": (None, (_INT, _POINTER, _POINTER, _FLOAT, _POINTER, _LONG, _LONG)),
    "llorch_rope": (None, (_INT, *[_POINTER] * 4, *[_LONG] * 4)),
    "llorch_append": (_INT, (_POINTER, _POINTER, _POINTER, *[_LONG] * 5)),
    "llorch_swiglu": (None, (_INT, _POINTER, _POINTER, _POINTER, _LONG)),
    "llorch_attend": (_INT, (_INT, *[_POINTER] * 6, *[_LONG] * 8)),
    "llorch_expert_product": (_INT, (*_MATRIX, _POINTER, _POINTER, _POINTER, *[_LONG] * 5)),
    "llorch_short_conv": (None, (_INT, *[_POINTER] * 6, *[_LONG] * 4)),
    "llorch_l2_norm": (None, (_POINTER, _POINTER, *[_LONG] * 4)),
    "llorch_delta_rule": (None, (*[_POINTER] * 7, *[_LONG] * 7)),
    "llorch_gated_norm": (None, (_INT, _POINTER, _POINTER, _POINTER, _FLOAT, _POINTER, _LONG, _LONG)),
    "llorch_pack_codes": (None, (_INT, _INT, _POINTER, _POINTER, _LONG, _LONG)),
    "llorch_block": (_INT, (_POINTER, _POINTER, _POINTER, _POINTER)),
}


class NotBuilt(Exception):
    """Failure of the compiler."""


@cache
def library() -> ctypes.CDLL | None:
    """Load the kernels, built now or by an earlier process; None, after a warning, if that fails."""
    command, why = find_compiler(), "no C compiler is installed"
    if command is not None:
        try:
            with loaded_asleep():
                compiled = declare_signatures(load_cached(command) or build_and_load(command))
            _end_threads_before_forks()
            return compiled
        except (NotBuilt, OSError) as error:  # no folder to write to, or to load from
            why = str(error)
    slower = "a token takes at least twice as long, and much longer with packed weights"
    logger.warning("CPU kernels are not built, so %s: %s", slower, why)
    return None


def _end_threads_before_forks() -> None:
    """End the OpenMP threads before each fork: a forked process would wait for them forever at its first product."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=end_waiting_threads)


def find_compiler() -> list[str] | None:
    """Return the command of the compiler in CC, else of the first installed compiler; None if there is none."""
    for candidate in (os.environ.get("CC", ""), *COMPILERS):
        name, *arguments = shlex.split(candidate) or [""]
        if path := shutil.which(name):
            return [path, *arguments]
    return None


def load_cached(command: Sequence[str]) -> ctypes.CDLL | None:
    """Load the library that an earlier process built, or build it into the cache; None if neither works."""
    folder = private_folder()
    if folder is None:
        return None
    target = folder / f"cpu-{identity(command)}.so"
    try:
        return ctypes.CDLL(str(target)) if is_sealed(target) else build_and_load(command, target)
    except OSError:
        return None


def private_folder() -> Path | None:
    """Return the user's cache folder if nobody else can write to it, because its contents are executed."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME", ""))
        folder = (home if home.is_absolute() else Path.home() / ".cache") / "llorch"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        return folder if status.st_uid == os.getuid() and not status.st_mode & 0o022 else None
    except (OSError, RuntimeError, AttributeError):  # not writable; no home; no user ids (Windows)
        return None


def identity(command: Sequence[str]) -> str:
    """Hash everything that determines the library: sources, flags, compiler and processor."""
    version = run([*command, "--version"], seconds=60).output
    sources = (path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.[ch]")))
    return digest(*sources, version, repr([*FLAGS, *command, platform.machine(), _processor()]).encode())


def digest(*parts: bytes) -> str:
    """Hash some byte strings to a name of 32 hexadecimal digits."""
    return sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()[:32]


def _processor() -> list[str]:
    """Return the lines of /proc/cpuinfo that determine -march=native: processor model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return [platform.processor()]
    return [line for line in lines if line.startswith(_CPU_LINES)]


def is_sealed(file: Path) -> bool:
    """Tell if a library file ends in its hash, as `build_and_load` writes it; a truncated library could crash."""
    try:
        content = file.read_bytes()
    except OSError:
        return False
    return content[-32:] == sha256(content[:-32]).digest()


def build_and_load(command: Sequence[str], target: Path | None = None) -> ctypes.CDLL:
    """Build and load the library; move it to `target` only when it is complete and has been loaded."""
    with tempfile.TemporaryDirectory(prefix="llorch-", dir=target and target.parent) as folder:
        file = Path(folder) / "cpu_kernels.so"
        build(command, file)
        content = file.read_bytes()
        file.write_bytes(content + sha256(content).digest())
        loaded = ctypes.CDLL(str(file))
        if target is not None:
            file.replace(target)
        return loaded


def build(command: Sequence[str], target: Path) -> None:
    """Compile the kernels into a file, one source per core; NotBuilt has the first line of the compiler's errors."""
    with tempfile.TemporaryDirectory(prefix="llorch-") as folder, ThreadPoolExecutor(n_cores()) as pool:
        objects = [Path(folder) / f"{source.stem}.o" for source in SOURCES]
        for _ in pool.map(lambda source, out: _compile(command, "-c", str(source), "-o", str(out)), SOURCES, objects):
            pass  # iterating raises errors of the calls
        _compile(command, *map(str, objects), "-o", str(target), "-lm")


def _compile(command: Sequence[str], *arguments: str) -> None:
    try:
        process = run([*command, *FLAGS, *arguments], seconds=BUILD)
    except OSError as error:
        raise NotBuilt(f"{command[0]}: {error}") from None
    if process.limit:
        raise NotBuilt(f"{command[0]}: it took over {BUILD:.0f} s")
    if process.status:
        lines = process.errors.decode("utf-8", "replace").strip().splitlines() or [f"exit status {process.status}"]
        raise NotBuilt(f"{shlex.join(command)}: {lines[0]}")


def declare_signatures(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the functions' signatures to ctypes."""
    for name, (return_type, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = return_type, arguments
    return library
