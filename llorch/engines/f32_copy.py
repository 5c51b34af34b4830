"""GGUF copy of a model in one float type, for llama.cpp, whose arithmetic depends on the type.

llama.cpp's quantiser converts GGUF files, so llama.cpp itself decodes and writes the weights. It cannot read Hugging
Face folders; llorch reads and writes these, and the load path says so.
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
    """Yield a GGUF file of the model with matrices of one float type, the configuration and the load path (tools used).

    An all-F32 file is used unchanged for float32. Other models are written to a temporary file, which is removed at the
    end. Norms and biases are F32 in every file. Raise an error if a weight overflows float16.
    """
    with ExitStack() as resources:
        weights = open_weights(path)
        load_path = LoadPath("llamacpp", "llamacpp")
        with closing(weights.source):
            if dtype != "float32" or not _is_f32_gguf(weights):
                folder = resources.enter_context(tempfile.TemporaryDirectory(prefix="llorch-"))
                path, load_path = _write_copy(weights, Path(folder) / f"{dtype}.gguf", dtype)
        yield path, weights.config, load_path


def _write_copy(weights: Weights, copy: Path, dtype: DtypeName) -> tuple[Path, LoadPath]:
    """Write the weights as a GGUF file of one float type; return its path and load path."""
    n_bytes = gguf_size(weights.config, FLOAT_TYPES[dtype])
    _require_disk_space(n_bytes, dtype, copy.parent)
    logger.info("%s: llama.cpp reads a copy in %s, %.1f MB in %s", weights.path, dtype, n_bytes / 1e6, copy)
    if isinstance(weights.source, GGUFFile):
        write_by_llamacpp(Path(weights.path), copy, FILE_TYPES[FLOAT_TYPES[dtype]])
        return copy, LoadPath("llamacpp", "llamacpp", "llamacpp")
    write_gguf(weights, copy, ggml_type=FLOAT_TYPES[dtype], tokenizer_metadata=None)
    return copy, LoadPath(OURS, OURS, OURS)


def write_by_llamacpp(path: Path, copy: Path, ftype: int) -> None:
    """Convert a GGUF file with llama.cpp's quantiser; `ftype` is one of `LLAMA_FTYPE_*`."""
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.allow_requantize = ftype, True
    if status := llama_cpp.llama_model_quantize(os.fsencode(path), os.fsencode(copy), ctypes.pointer(settings)):
        raise RuntimeError(f"llama.cpp: converting {path} failed with status {status}")


def _is_f32_gguf(weights: Weights) -> bool:
    source = weights.source
    types = {tensor.ggml_type.name for tensor in source.tensors.values()} if isinstance(source, GGUFFile) else {}
    return types == {"F32"}


def _require_disk_space(n_bytes: int, dtype: DtypeName, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        needed = f"llama.cpp needs these weights as a {dtype} GGUF file of {n_bytes / 1e9:.1f} GB"
        message = f"{needed}, but only {free / 1e9:.1f} GB are free; set TMPDIR to a larger place"
        raise OSError(errno.ENOSPC, message, str(folder))
