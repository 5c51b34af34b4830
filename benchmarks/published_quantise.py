"""Quantisation of a GGUF file by llama.cpp; for `published_files.py` and `speed.py`, in a child process for engines."""

import ctypes
from pathlib import Path

import llama_cpp

from llorch.files.gguf import open_gguf

_LAST: list[str] = []


@llama_cpp.llama_log_callback
def _log(_level: int, text: bytes, _user_data: int | None) -> None:
    if line := text.decode(errors="replace").strip():
        _LAST[:] = [*_LAST[-4:], line]


def quantise(source: Path, path: Path, file_type: int, n_threads: int) -> None:
    """Write the copy, with an importance matrix of ones for the types that need one."""
    llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.nthread, settings.allow_requantize = file_type, n_threads, True
    table = importance(source)
    settings.imatrix = ctypes.cast(table, ctypes.POINTER(llama_cpp.llama_model_imatrix_data))
    if status := llama_cpp.llama_model_quantize(bytes(source), bytes(path), ctypes.pointer(settings)):
        raise ChildProcessError(f"llama.cpp: status {status} for {path.name}: {'; '.join(_LAST[-2:])}")


def importance(source: Path) -> ctypes.Array:
    """Make llama.cpp's importance matrix: 1 for all columns."""
    with open_gguf(source) as file:
        shapes = {name: info.shape for name, info in file.tensors.items() if len(info.shape) > 1}
    widths = {name: shape[-1] * (shape[0] if len(shape) == 3 else 1) for name, shape in shapes.items()}  # 3: experts
    table = (llama_cpp.llama_model_imatrix_data * (len(widths) + 1))()  # an entry without a name ends it
    for entry, (name, width) in zip(table, widths.items(), strict=False):
        entry.name, entry.size = name.encode(), width
        entry.data = (ctypes.c_float * width)(*([1.0] * width))
    return table
