"""Reference engines: engines that other people wrote, behind one interface that shows the same stages for each.

This process imports none of an engine's code, so llorch works without them, and when they crash.
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
from llorch.runtime.threads import n_asked

__all__ = [
    "OURS", "Call", "EngineName", "LoadPath", "Progress", "ReferenceEngine", "open_engine", "open_here",
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
    """Load a model into an engine, in a process of its own; to be closed or used in a `with` statement.

    With `EXACT` numerics the engine is shown float weights of `dtype`; `GGML` lets llama.cpp compute with the file as
    it is. In half precision transformers keeps activations in it too, llama.cpp rounds to it what it multiplies with a
    matrix. `streamed`: transformers holds one layer at a time; if not told, where the whole model does not fit. Such a
    run tells `progress` how far it is. `n_threads`: if not told, as many as the user asks for. Every method may raise
    EngineDied.
    """
    for package in _PACKAGES.get(name, ()):
        if find_spec(package) is None:
            raise MissingExtra("golden", package)
    settings = {"n_threads": n_threads or n_asked(), "numerics": numerics, "dtype": dtype, "streamed": streamed}
    opened = EngineInChild(name, path, f"{__name__}:open_here", name, path, progress=progress, **settings)
    return cast(ReferenceEngine, opened)


def open_here(
    name: EngineName,
    path: str | Path,
    *,
    n_threads: int | None = None,
    numerics: Numerics = EXACT,
    dtype: DtypeName = "float32",
    streamed: bool | None = None,
) -> ReferenceEngine:
    """Open an engine in this process, which it changes; see `open_engine`."""
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
