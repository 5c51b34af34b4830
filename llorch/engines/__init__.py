"""Reference engines: llama.cpp and transformers, behind one interface with equal stages (named intermediate arrays).

They run in child processes. So llorch works if an engine is not installed or crashes.
"""

import importlib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import cast, get_args

from llorch.engines.interface import OURS, Call, EngineName, LoadPath, ReferenceEngine, stored_load_path
from llorch.engines.process import GGML_VARIABLES, EngineInChild, Progress
from llorch.ops.numerics import EXACT, DtypeName, Numerics
from llorch.runtime.errors import MissingExtra, UserError
from llorch.runtime.threads import n_requested

__all__ = [
    "OURS", "Call", "EngineName", "LoadPath", "Progress", "ReferenceEngine", "open_engine", "open_in_process",
    "stored_load_path",
]  # fmt: skip
_PACKAGES = {"llamacpp": ("llama_cpp",), "transformers": ("torch", "transformers")}


def open_engine(
    name: EngineName,
    path: str | Path,
    *,
    n_threads: int | None = None,
    numerics: Numerics = EXACT,
    dtype: DtypeName = "float32",
    streamed: bool | None = None,
    progress: Progress | None = None,
) -> ReferenceEngine:
    """Load a model into an engine in a child process; close the engine, or use it in a `with` statement.

    `EXACT` numerics give the engine float weights of `dtype`; `GGML` gives llama.cpp the unchanged file, so that it
    rounds activations to suit quantised weights. Half precision rounds all activations in transformers, and the inputs
    of products in llama.cpp. `streamed`: transformers holds one layer at a time; None: only if the whole model does not
    fit. A streamed run calls `progress` with a text for every layer. If `n_threads` is None, the user's setting is
    used, else a number for the size of the model. Every method of the engine may raise EngineDied.
    """
    for package in _PACKAGES.get(name, ()):
        if find_spec(package) is None:
            raise MissingExtra("golden", package)
    settings = {"n_threads": n_threads or n_requested(), "numerics": numerics, "dtype": dtype, "streamed": streamed}
    opened = EngineInChild(name, path, f"{__name__}:open_in_process", name, path, progress=progress, **settings)
    return cast(ReferenceEngine, opened)


def open_in_process(
    name: EngineName,
    path: str | Path,
    *,
    n_threads: int | None = None,
    numerics: Numerics = EXACT,
    dtype: DtypeName = "float32",
    streamed: bool | None = None,
) -> ReferenceEngine:
    """Open an engine in the current process, whose global state it changes; arguments as for `open_engine`."""
    if name == "llamacpp":
        os.environ |= GGML_VARIABLES
        _require_package("llama_cpp")
        from llorch.engines.llamacpp import LlamaCpp

        return LlamaCpp(path, n_threads=n_threads, numerics=numerics, dtype=dtype)
    if name == "transformers" and numerics != EXACT:
        raise UserError(f"transformers: expected exact numerics, got {numerics}; use llamacpp")
    if name == "transformers":
        _require_package("torch")
        _require_package("transformers")
        from llorch.engines.transformers import Transformers

        return Transformers(path, n_threads=n_threads, dtype=dtype, streamed=streamed)
    raise UserError(f"engine: expected one of {', '.join(get_args(EngineName))}, got {name!r}")


def _require_package(package: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise MissingExtra("golden", package) from error
