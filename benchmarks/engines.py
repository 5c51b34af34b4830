"""Engines that are timed, each with the model loaded: llorch, llama.cpp and transformers.

The reference engines run, and are timed, in child processes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from llorch.files.residency import Residency
    from llorch.ops.numerics import Numerics


class Engine(Protocol):
    """One engine with the model loaded."""

    def prefill(self, ids: list[int]) -> None:
        """Run a prompt from an empty cache, up to the logits of its last token."""
        ...

    def decode(self, token_id: int) -> None:
        """Run one more token, up to its logits."""
        ...


class Timed:
    """An engine in the process where it is timed."""

    def __init__(self, kind: str, *args: object) -> None:
        """Load it."""
        self._engine: Engine = globals()[kind](*args)

    def one_round(self, prompts: Sequence[int], n_decode: int) -> list:
        """See `rounds.one_round`."""
        from rounds import one_round

        return one_round(self._engine, prompts, n_decode)


def foreign(kind: str, path: Path, *args: object) -> Any:
    """Load a reference engine, `LlamaCpp` or `Transformers`, in a child process, as a `Timed` there."""
    from llorch.engines.process import EngineInChild

    return EngineInChild({"LlamaCpp": "llama.cpp"}.get(kind, kind.lower()), path, "engines:Timed", kind, path, *args)


class Llorch:
    """llorch's NumPy path; its thread count comes from the environment, set before NumPy is imported."""

    def __init__(self, path: Path, numerics: "Numerics | None" = None, residency: "Residency" = "auto") -> None:
        """Load a GGUF file."""
        import llorch
        from llorch.ops.numerics import EXACT

        self._model = llorch.load(path, numerics=numerics or EXACT, residency=residency)

    def prefill(self, ids: list[int]) -> None:
        """See `Engine`."""
        from llorch.model.cache import KVCache

        self._cache = KVCache.of(self._model.weights)
        self._model.forward(ids, cache=self._cache, last_only=True)

    def decode(self, token_id: int) -> None:
        """See `Engine`."""
        self._model.forward([token_id], cache=self._cache, last_only=True)


class LlorchTorch:
    """llorch's torch path on the CPU."""

    def __init__(
        self, path: Path, n_threads: int, dtype: str, residency: "Residency" = "auto", room: int = 1024
    ) -> None:
        """Load a GGUF file; `room` is the number of tokens in the cache."""
        import torch

        from llorch.pytorch.model import load_torch

        torch.set_num_threads(n_threads)
        self._torch, self._room = torch, room
        self._model = load_torch(path, dtype=dtype, residency=residency)

    def prefill(self, ids: list[int]) -> None:
        """See `Engine`."""
        self._cache, self._length = self._model.new_cache(1, self._room), 0
        self._step(ids)

    def decode(self, token_id: int) -> None:
        """See `Engine`."""
        self._step([token_id])

    def _step(self, ids: list[int]) -> None:
        torch, start = self._torch, self._length
        self._length += len(ids)
        with torch.inference_mode():
            place = self._cache.place(torch.arange(start, self._length)[None], ctx=self._length, causal=True)
            self._model.module(torch.tensor([ids]), place, self._cache, rows=torch.tensor([len(ids) - 1]))


class LlamaCpp:
    """llama.cpp as llama-cpp-python sets it up by default, on the CPU."""

    def __init__(self, path: Path, n_threads: int, extra_buffers: bool = True, n_ctx: int = 1024) -> None:
        """Load a GGUF file; with `extra_buffers` llama.cpp repacks matrices for the processor, as for AMX."""
        from llama_cpp import Llama, llama_cpp

        default = llama_cpp.llama_model_default_params()
        default.use_extra_bufts = extra_buffers
        llama_cpp.llama_model_default_params = lambda: default  # `Llama` has no parameter for it
        self._llama = Llama(str(path), n_ctx=n_ctx, n_threads=n_threads, n_threads_batch=n_threads, verbose=False)

    def prefill(self, ids: list[int]) -> None:
        """See `Engine`."""
        self._llama.reset()
        self._llama.eval(ids)

    def decode(self, token_id: int) -> None:
        """See `Engine`."""
        self._llama.eval([token_id])


class Transformers:
    """transformers with its default attention and cache, on the CPU."""

    def __init__(self, folder: Path, n_threads: int, dtype: str = "float32") -> None:
        """Load a Hugging Face folder."""
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(n_threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def prefill(self, ids: list[int]) -> None:
        """See `Engine`."""
        self._past = None
        self._step(ids)

    def decode(self, token_id: int) -> None:
        """See `Engine`."""
        self._step([token_id])

    def _step(self, ids: list[int]) -> None:
        with self._torch.inference_mode():
            out = self._model(self._torch.tensor([ids]), past_key_values=self._past, use_cache=True, logits_to_keep=1)
        self._past = out.past_key_values
