"""The compiled part of the CPU kernels, the C files beside this one, built for this very processor when needed.

Building takes some seconds with any compiler that knows OpenMP. The library is kept in a folder that belongs to the
user alone, under a name made of sources, compiler and processor. If there can be no such folder, or nothing is loaded
from it, every process builds for itself in a temporary one; if that fails, too, it runs on torch's functions, and says
so once. The loops share torch's OpenMP threads, because torch's library is loaded before.
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

import torch

from llorch.runtime.threads import n_cores
from llorch.runtime.worker import run

logger = logging.getLogger(__name__)

SOURCES = tuple(
    Path(__file__).with_name(f"cpu_{name}.c")
    for name in ("products", "fixed", "layer", "attention", "block", "delta", "packing")
)
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")
BUILD = 120.0  # seconds
_TELLING = ("vendor", "cpu family", "model", "stepping", "flags", "CPU ", "Features")  # lines of /proc/cpuinfo

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_MATRIX = (_INT, _POINTER, _POINTER, _POINTER, _POINTER, _INT)
SIGNATURES = {
    "llorch_product": (_INT, (*_MATRIX, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG)),
    "llorch_fixed_product": (_INT, (*_MATRIX, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG)),
    "llorch_decode": (None, (*_MATRIX, _POINTER, _LONG, _LONG, _LONG)),
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
    "llorch_pack_blocks": (None, (_INT, *[_POINTER] * 6, _LONG)),
    "llorch_block": (_INT, (_POINTER, _POINTER, _POINTER, _POINTER)),
}


class NotBuilt(Exception):
    """The compiler failed."""


@cache
def library() -> ctypes.CDLL | None:
    """Load the kernels, built now or by an earlier process; None, after a warning, where that fails."""
    command, why = find_compiler(), "no C compiler is installed"
    if command is not None:
        try:
            return declared(kept(command) or built(command))
        except (NotBuilt, OSError) as error:  # no folder to write to, or to load from
            why = str(error)
    slower = "a token takes at least twice as long, and much longer with packed weights"
    logger.warning("CPU kernels are not built, so %s: %s", slower, why)
    return None


def find_compiler() -> list[str] | None:
    """Return the command of the compiler that CC names, or of the first that is installed; None if there is none."""
    for text in (os.environ.get("CC", ""), *COMPILERS):
        name, *arguments = shlex.split(text) or [""]
        if path := shutil.which(name):
            return [path, *arguments]
    return None


def kept(command: Sequence[str]) -> ctypes.CDLL | None:
    """Load the library of an earlier process, or build it for processes to come; None where neither can be."""
    folder = private_folder()
    if folder is None:
        return None
    target = folder / f"cpu-{identity(command)}.so"
    try:
        return ctypes.CDLL(str(target)) if is_sealed(target) else built(command, target)
    except OSError:
        return None


def private_folder() -> Path | None:
    """Return the folder of this user's caches, if nobody else can write there: its contents will be executed."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME", ""))
        folder = (home if home.is_absolute() else Path.home() / ".cache") / "llorch"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        return folder if found.st_uid == os.getuid() and not found.st_mode & 0o022 else None
    except (OSError, RuntimeError, AttributeError):  # not writable; no home; no user ids (Windows)
        return None


def identity(command: Sequence[str]) -> str:
    """Hash everything that decides the bytes of the library: sources, flags, compiler and processor."""
    version = run([*command, "--version"], seconds=60).output
    sources = (path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.[ch]")))
    return digest(*sources, version, repr([*FLAGS, *command, platform.machine(), _processor()]).encode())


def digest(*parts: bytes) -> str:
    """Hash some parts to a name of 32 hexadecimal digits."""
    return sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()[:32]


def _processor() -> list[str]:
    """Return what decides -march=native, as Linux tells it: the model of the processor and its features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return [platform.processor()]
    return [line for line in lines if line.startswith(_TELLING)]


def is_sealed(file: Path) -> bool:
    """Return whether a library ends in its digest, as `built` writes it; loading a torn file could end the process."""
    try:
        data = file.read_bytes()
    except OSError:
        return False
    return data[-32:] == sha256(data[:-32]).digest()


def built(command: Sequence[str], target: Path | None = None) -> ctypes.CDLL:
    """Build the library and load it; it is put at `target`, for others, once it is whole and can be loaded."""
    with tempfile.TemporaryDirectory(prefix="llorch-", dir=target and target.parent) as folder:
        made = Path(folder) / "cpu_kernels.so"
        build(command, made)
        data = made.read_bytes()
        made.write_bytes(data + sha256(data).digest())
        loaded = ctypes.CDLL(str(made))
        if target is not None:
            made.replace(target)
        return loaded


def build(command: Sequence[str], target: Path) -> None:
    """Compile the kernels into a file, one source on each core; NotBuilt has the first line of the compiler."""
    with tempfile.TemporaryDirectory(prefix="llorch-") as folder, ThreadPoolExecutor(n_cores()) as pool:
        made = [Path(folder) / f"{source.stem}.o" for source in SOURCES]
        for _ in pool.map(lambda source, to: _compile(command, "-c", str(source), "-o", str(to)), SOURCES, made):
            pass  # an error of a call is raised here
        _compile(command, *map(str, made), "-o", str(target), "-lm")


def _compile(command: Sequence[str], *arguments: str) -> None:
    try:
        ended = run([*command, *FLAGS, *arguments], seconds=BUILD)
    except OSError as error:
        raise NotBuilt(f"{command[0]}: {error}") from None
    if ended.limit:
        raise NotBuilt(f"{command[0]}: it took over {BUILD:.0f} s")
    if ended.status:
        lines = ended.errors.decode("utf-8", "replace").strip().splitlines() or [f"exit status {ended.status}"]
        raise NotBuilt(f"{shlex.join(command)}: {lines[0]}")


def declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes the signatures of the functions."""
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Return the address of the elements, which must be contiguous; None is a null pointer."""
    return None if tensor is None else tensor.data_ptr()
