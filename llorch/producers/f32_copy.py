"""A GGUF file of the same weights in float32, for an engine that computes differently with other types."""

import errno
import logging
import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from llorch.config import ModelConfig
from llorch.weights import Weights, open_weights
from llorch.weights.export import write_gguf
from llorch.weights.gguf import GGUFFile

logger = logging.getLogger(__name__)


@contextmanager
def f32_gguf(path: Path) -> Iterator[tuple[Path, ModelConfig]]:
    """Give a path at which an all-F32 GGUF file of the model lies.

    A GGUF file of that kind is given as it is; anything else is written to a temporary file without
    vocabulary, which is removed at the end.

    Args:
        path: A GGUF file or a Hugging Face folder.

    Yields:
        The path, and the model's configuration.

    Raises:
        OSError: The temporary file would not fit.
    """
    with ExitStack() as resources:
        weights = open_weights(path)
        with closing(weights.source):
            if not _is_f32_gguf(weights):
                folder = resources.enter_context(tempfile.TemporaryDirectory(prefix="llorch-"))
                path = _written(weights, Path(folder) / "float32.gguf")
        yield path, weights.config


def _written(weights: Weights, copy: Path) -> Path:
    n_bytes = sum(4 * math.prod(info.shape) for info in weights.source.tensors.values())
    _check_room(n_bytes, copy.parent)
    logger.info("%s: goes to llama.cpp as float32, %.1f MB in %s", weights.path, n_bytes / 1e6, copy)
    write_gguf(weights, copy, tokenizer_metadata=None)
    return copy


def _is_f32_gguf(weights: Weights) -> bool:
    source = weights.source
    types = {info.ggml_type.name for info in source.tensors.values()} if isinstance(source, GGUFFile) else {}
    return types == {"F32"}


def _check_room(n_bytes: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        raise OSError(
            errno.ENOSPC,
            f"llama.cpp needs these weights as a float32 GGUF file of {n_bytes / 1e9:.1f} GB, "
            f"but only {free / 1e9:.1f} GB are free; set TMPDIR to a larger place",
            str(folder),
        )
