"""A GGUF file of the same weights in one float type, for an engine whose arithmetic depends on the type.

Of a GGUF file llama.cpp's own quantiser makes it: what it computes from was then decoded and written by llama.cpp. A
folder, which no part of its package reads, is read and written by llorch, and the route says so.
"""

import ctypes
import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from llorch.engines.interface import OURS, LoadPath
from llorch.families.config import ModelConfig
from llorch.files import Weights, open_weights
from llorch.files.export import FILE_TYPES, gguf_size, write_gguf
from llorch.files.gguf import GGUFFile
from llorch.files.quant import GGMLType
from llorch.ops.numerics import DtypeName

logger = logging.getLogger(__name__)

FLOAT_TYPES: Mapping[DtypeName, GGMLType] = {
    "float32": GGMLType.F32,
    "bfloat16": GGMLType.BF16,
    "float16": GGMLType.F16,
}


@contextmanager
def float_gguf(path: Path, dtype: DtypeName) -> Iterator[tuple[Path, ModelConfig, LoadPath]]:
    """Give a path at which a GGUF file of the model lies whose matrices have one float type, and the route to it.

    An all-F32 file is given as it is when that is asked for; anything else is written to a temporary file, which is
    removed at the end. Norms and biases are F32 in every file. A weight that float16 cannot hold is refused.
    """
    with ExitStack() as resources:
        weights = open_weights(path)
        load_path = LoadPath("llamacpp", "llamacpp")
        with closing(weights.source):
            if dtype != "float32" or not _is_f32_gguf(weights):
                folder = resources.enter_context(tempfile.TemporaryDirectory(prefix="llorch-"))
                path, load_path = _written(weights, Path(folder) / f"{dtype}.gguf", dtype)
        yield path, weights.config, load_path


def _written(weights: Weights, copy: Path, dtype: DtypeName) -> tuple[Path, LoadPath]:
    """Write the weights as a GGUF file of one float type; return its path and the tools that made it."""
    n_bytes = gguf_size(weights.config, FLOAT_TYPES[dtype])
    _check_room(n_bytes, dtype, copy.parent)
    logger.info("%s: llama.cpp reads a copy in %s, %.1f MB in %s", weights.path, dtype, n_bytes / 1e6, copy)
    if isinstance(weights.source, GGUFFile):
        write_by_llamacpp(Path(weights.path), copy, FILE_TYPES[FLOAT_TYPES[dtype]])
        return copy, LoadPath("llamacpp", "llamacpp", "llamacpp")
    write_gguf(weights, copy, ggml_type=FLOAT_TYPES[dtype], tokenizer_metadata=None)
    return copy, LoadPath(OURS, OURS, OURS)


def write_by_llamacpp(path: Path, copy: Path, ftype: int) -> None:
    """Let llama.cpp's quantiser write a GGUF file anew, matrices as one of `LLAMA_FTYPE_*`."""
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.allow_requantize = ftype, True
    if status := llama_cpp.llama_model_quantize(os.fsencode(path), os.fsencode(copy), ctypes.pointer(settings)):
        raise RuntimeError(f"llama.cpp: converting {path} failed with status {status}")


def _is_f32_gguf(weights: Weights) -> bool:
    source = weights.source
    types = {info.ggml_type.name for info in source.tensors.values()} if isinstance(source, GGUFFile) else {}
    return types == {"F32"}


def _check_room(n_bytes: int, dtype: DtypeName, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        needed = f"llama.cpp needs these weights as a {dtype} GGUF file of {n_bytes / 1e9:.1f} GB"
        message = f"{needed}, but only {free / 1e9:.1f} GB are free; set TMPDIR to a larger place"
        raise OSError(errno.ENOSPC, message, str(folder))
