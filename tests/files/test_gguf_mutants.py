"""Thousands of damaged copies of one sound file: refused or read, nothing else; never laxer than llama.cpp."""

import ctypes
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from builders.gguf_bytes import sound_file
from helpers.ggml_library import load_ggml
from helpers.work_limit import work_limit

from llorch.files import open_gguf
from llorch.runtime.errors import FormatError

EXTREMES = [struct.pack("<Q", number) for number in (0, 1, 7, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 64, 2**64 - 1)]


def mutants(count: int, seed: int) -> Iterator[bytes]:
    rng = np.random.default_rng(seed)
    sound = sound_file()
    for _ in range(count):
        data = bytearray(sound)
        for _ in range(rng.integers(1, 4)):
            place = int(rng.integers(len(data)))
            match rng.integers(5):
                case 0:
                    data[place] ^= 1 << int(rng.integers(8))
                case 1:
                    data[place] = int(rng.integers(256))
                case 2:
                    data[place : place + 8] = EXTREMES[rng.integers(len(EXTREMES))]
                case 3:
                    del data[place : place + int(rng.integers(1, 64))]
                case _:
                    data[place:place] = data[place : place + int(rng.integers(1, 64))]
        yield bytes(data)


def mutant_files(folder: Path, count: int, seed: int) -> Iterator[Path]:
    """One fresh file per mutant: overwriting one file again and again waits for the disk."""
    for index, data in enumerate(mutants(count, seed)):
        path = folder / f"mutant{index}.gguf"
        path.write_bytes(data)
        yield path
        path.unlink()


def read_everything(path: Path) -> bool:
    """True if the file is accepted; anything but FormatError escapes and fails the test."""
    try:
        with open_gguf(path) as file:
            str(file.metadata)
            for name in file.tensors:
                file.array(name).sum(dtype=np.float64)
    except FormatError:
        return False
    return True


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in reduce:RuntimeWarning")
def test_mutants_are_read_or_refused_with_format_error_only(tmp_path: Path):
    accepted = 0
    for path in mutant_files(tmp_path, 2000, seed=0):
        with work_limit(20_000):
            accepted += read_everything(path)
    assert 0 < accepted < 2000  # both outcomes occur: the test can see


class Parameters(ctypes.Structure):
    """`struct gguf_init_params`."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


@pytest.fixture
def llamacpp_accepts() -> Callable[[Path], bool]:
    ggml = load_ggml()
    ggml.gguf_init_from_file.restype = ctypes.c_void_p
    ggml.gguf_init_from_file.argtypes = [ctypes.c_char_p, Parameters]
    ggml.gguf_free.argtypes = [ctypes.c_void_p]

    def accepts(path: Path) -> bool:
        context = ggml.gguf_init_from_file(str(path).encode(), Parameters(True, None))
        if context:
            ggml.gguf_free(context)
        return bool(context)

    return accepts


@pytest.mark.live
def test_nothing_is_accepted_that_llamacpp_refuses(tmp_path: Path, llamacpp_accepts: Callable[[Path], bool]):
    sound = tmp_path / "sound.gguf"
    sound.write_bytes(sound_file())
    assert llamacpp_accepts(sound)
    theirs = 0
    for path in mutant_files(tmp_path, 1000, seed=1):
        accepted = llamacpp_accepts(path)
        theirs += accepted
        try:
            open_gguf(path).close()
        except FormatError:
            continue
        assert accepted, f"{path.name} is accepted here and refused by llama.cpp"
    assert theirs > 0
