"""llama.cpp with a LoRA adapter beside the weights: the witness for what our LoRA GGUF files mean to it."""

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import llama_cpp
import numpy as np
from jaxtyping import Float32

from llorch.numerics import EXACT, Numerics
from llorch.verify.witnesses.llamacpp import LlamaCpp, last_errors


class LlamaCppWithAdapter(LlamaCpp):
    """The producer `llamacpp`, every run of it with one adapter; a context manager that frees the model."""

    def __init__(
        self, path: str | Path, adapter: str | Path, *, n_threads: int | None = None, numerics: Numerics = EXACT
    ) -> None:
        """Load a model, as for `LlamaCpp`, and a LoRA GGUF file."""
        super().__init__(path, n_threads=n_threads, numerics=numerics)
        # Freed together with the model.
        self._adapter = llama_cpp.llama_adapter_lora_init(self._model(), os.fsencode(adapter))
        if not self._adapter:
            self.close()
            raise OSError(f"llama.cpp: cannot load the adapter {adapter}: {last_errors()}")

    @contextmanager
    def _context(self, n_tokens: int, watcher: object = None) -> Iterator[llama_cpp.llama_context_p]:
        with super()._context(n_tokens, watcher) as context:  # type: ignore[arg-type] (the base's private watcher)
            adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(self._adapter)
            if llama_cpp.llama_set_adapters_lora(context, adapters, 1, (ctypes.c_float * 1)(1.0)) != 0:
                raise RuntimeError(f"llama.cpp: the adapter was not taken: {last_errors()}")
            yield context


def logits_with_adapter(
    model: str | Path, adapter: str | Path, ids: Sequence[int], *, numerics: Numerics = EXACT
) -> Float32[np.ndarray, "seq vocab"]:
    """Logits of every token from llama.cpp with a LoRA GGUF file."""
    with LlamaCppWithAdapter(model, adapter, numerics=numerics) as engine:
        return engine.logits(ids)
