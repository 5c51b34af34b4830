"""Goldens from llama.cpp: an unmodified build, watched through its scheduler callback.

Everything that could move a number away from plain float32 is switched off: weights and KV cache are F32, no
flash attention, no repacked weights, one micro-batch, no GPU. llama.cpp's CPU backend rounds the *activations* to
suit the weights' type when these are F16, BF16 or quantised (an error near 1e-2), so llama.cpp's own quantiser makes a
temporary F32 file first: we ask what these weights mean. With the numerics `ggml` it is given the file as it is: then
we ask what llama.cpp computes from it. And a temporary file in bfloat16 or float16 asks what a run in that dtype is:
products round their inputs to it, everything else stays float32. How a copy is made, see f32_copy.
"""

import ctypes
import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from jaxtyping import Float32

from llorch.engines import ggml_tensor
from llorch.engines.f32_copy import FLOAT_TYPES, float_gguf
from llorch.engines.interface import Call, LoadPath, Trace, check_ids, checked_trace, one_by_one
from llorch.engines.llamacpp_graph import GraphCapture, GraphWatcher
from llorch.engines.process import GGML_VARIABLES
from llorch.families.config import ModelConfig
from llorch.files import open_weights
from llorch.files.tensor_names import count_parameters
from llorch.ops.numerics import EXACT, DtypeName, Numerics
from llorch.ops.sampling import SamplingSettings
from llorch.runtime.errors import UserError
from llorch.runtime.threads import n_threads_for

logger = logging.getLogger(__name__)

ERROR_LEVEL, CONTINUED = 4, 5  # GGML_LOG_LEVEL_ERROR, GGML_LOG_LEVEL_CONT
KNOBS = {"flash_attn": "disabled", "use_extra_bufts": False, "n_gpu_layers": 0, "n_ubatch": "all tokens"}

TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data

_errors: deque[str] = deque(maxlen=4)


@llama_cpp.llama_log_callback
def _log(level: int, text: bytes, _user_data: int | None) -> None:
    """Silence llama.cpp, but remember what it said last about errors; a process of its own writes all of it down."""
    line = text.decode(errors="replace").strip()
    if level != CONTINUED:
        logger.debug(line)
    if level == ERROR_LEVEL:
        _errors.append(line)


class LlamaCpp:
    """The reference engine `llamacpp`; a context manager that frees the model."""

    name = "llamacpp"

    def __init__(
        self,
        path: str | Path,
        *,
        n_threads: int | None = None,
        numerics: Numerics = EXACT,
        dtype: DtypeName = "float32",
    ) -> None:
        """Load a model; other than exact numerics take a GGUF file only, and its own types."""
        ggml_tensor.check_layout()
        llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.path = Path(path)
        self.numerics = numerics
        self.dtype: DtypeName = dtype
        with ExitStack() as resources:
            run_path, self.config, self.load_path = resources.enter_context(_as_run(self.path, numerics, dtype))
            self.n_threads = n_threads or n_threads_for(count_parameters(self.config))
            model = vocabulary = resources.enter_context(_loaded_model(run_path, self.path, dtype))
            if run_path != self.path and self.path.is_file():
                vocabulary = resources.enter_context(_loaded_model(self.path, self.path, dtype, vocab_only=True))
            self._models: tuple[llama_cpp.llama_model_p, llama_cpp.llama_model_p] | None = (model, vocabulary)
            self._resources = resources.pop_all()

    def __enter__(self) -> "LlamaCpp":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model and remove temporary files."""
        self._resources.close()
        self._models = None

    def _model(self, *, for_text: bool = False) -> llama_cpp.llama_model_p:
        """Return the open model, or the one with the vocabulary `for_text`; ValueError after `close`."""
        if self._models is None:
            raise ValueError("llamacpp: the engine is closed")
        return self._models[1 if for_text else 0]

    def trace(self, ids: Sequence[int], *, first_position: int = 0) -> Trace:
        """Run the tokens from an empty cache and return every stage of the model's family."""
        capture = GraphCapture(self.config, len(ids))
        self._logits(ids, first_position, GraphWatcher(capture))
        return checked_trace(capture.stages(), self.config, len(ids), self.name)

    def logits(self, ids: Sequence[int], *, first_position: int = 0) -> np.ndarray:
        """Return the logits of every token from a run without capture, bit-identical to the logits of `trace`."""
        return self._logits(ids, first_position, None)

    def selected_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Compute the logits that llama.cpp's sampler sees: those of the last token, the only ones computed."""
        check_ids(ids, self.config)
        with self._context(len(ids)) as context:
            _decode(context, ids, first_position=0, all_logits=False)
            return self._row(context, -1)

    def greedy(self, ids: Sequence[int], n: int) -> list[int]:
        """Continue by `n` tokens with llama.cpp's greedy sampler and KV cache; end tokens do not stop it."""
        check_ids(ids, self.config)
        sampler = llama_cpp.llama_sampler_init_greedy()
        out: list[int] = []
        try:
            with self._context(len(ids) + n) as context:
                step, position = list(ids), 0
                while len(out) < n:
                    _decode(context, step, first_position=position, all_logits=False)
                    position += len(step)
                    step = [llama_cpp.llama_sampler_sample(sampler, context, -1)]
                    out += step
        finally:
            llama_cpp.llama_sampler_free(sampler)
        return out

    def call_batch(self, calls: Sequence[Call]) -> list[Any]:
        """Answer each of the calls, one by one."""
        return one_by_one(self, calls)

    def probabilities(self, logits: np.ndarray, settings: SamplingSettings, history: Sequence[int]) -> np.ndarray:
        """Compute the distribution that llama.cpp's own sampler chain draws from.

        The chain is penalty, temperature, top-k, top-p, min-p, then the draw. The normalised probabilities of the draw
        are read back. They are 0 for tokens that the chain removed.
        """
        candidates = np.zeros(len(logits), TOKEN_DATA)
        candidates["id"], candidates["logit"] = np.arange(len(logits)), logits
        data = candidates.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
        array = (llama_cpp.llama_token_data_array * 1)((data, len(logits), -1, False))
        with _sampler_chain(settings, history, n_vocab=len(logits)) as chain:
            llama_cpp.llama_sampler_apply(chain, array)
        kept = candidates[: array[0].size]  # the chain moves what it keeps to the front
        out = np.zeros(len(logits), np.float32)
        out[kept["id"]] = kept["p"]
        return out

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int] | None:
        """Return the token ids of llama.cpp's tokenizer; None for a file without a vocabulary."""
        vocabulary = llama_cpp.llama_model_get_vocab(self._model(for_text=True))
        assert vocabulary is not None
        if llama_cpp.llama_vocab_type(vocabulary) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
            return None
        data = text.encode()
        room = len(data) + 8  # a token covers a byte or more; special tokens come on top
        buffer = (llama_cpp.llama_token * room)()
        n = llama_cpp.llama_tokenize(vocabulary, data, len(data), buffer, room, add_special, parse_special)
        if n < 0:
            raise RuntimeError(f"llama.cpp: {len(data)} bytes of text need {-n} tokens, expected up to {room}")
        return list(buffer[:n])

    def provenance(self) -> dict[str, object]:
        """Return the facts about a golden's origin that the golden must state."""
        weights = FLOAT_TYPES[self.dtype].name if self.numerics == EXACT else "as in the file"
        cache_types = {"type_k": self._cache_type, "type_v": self._cache_type}
        return {
            "producer": self.name,
            "llama_cpp_python": llama_cpp.__version__,
            "ggml": ggml_tensor.libggml.ggml_version().decode(),
            "ggml_commit": ggml_tensor.libggml.ggml_commit().decode(),
            "system": llama_cpp.llama_print_system_info().decode().strip(" |"),
            "n_threads": self.n_threads,
            "route": self.load_path.stored(),
            "knobs": {"weights": weights, **cache_types, **KNOBS, **GGML_VARIABLES},
        }

    @property
    def _cache_type(self) -> str:
        return self.numerics.kv_cache.upper()

    def _logits(self, ids: Sequence[int], first_position: int, watcher: "GraphWatcher | None") -> np.ndarray:
        check_ids(ids, self.config)
        with self._context(len(ids), watcher) as context:
            _decode(context, ids, first_position=first_position, all_logits=True, watcher=watcher)
            return np.stack([self._row(context, i) for i in range(len(ids))])

    @contextmanager
    def _context(self, n_tokens: int, watcher: "GraphWatcher | None" = None) -> Iterator[llama_cpp.llama_context_p]:
        """Create a context with an empty KV cache for up to `n_tokens` tokens at once, and free it after use."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = n_tokens
        params.n_threads = params.n_threads_batch = self.n_threads
        params.type_k = params.type_v = getattr(llama_cpp, f"GGML_TYPE_{self._cache_type}")
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.offload_kqv = params.op_offload = False
        if watcher is not None:
            params.cb_eval = watcher.callback
        context = llama_cpp.llama_init_from_model(self._model(), params)
        if not context:
            raise RuntimeError(f"llama.cpp: cannot create a context for {n_tokens} tokens: {last_errors()}")
        try:
            yield context
        finally:
            llama_cpp.llama_free(context)

    def _row(self, context: llama_cpp.llama_context_p, i: int) -> np.ndarray:
        pointer = llama_cpp.llama_get_logits_ith(context, i)
        return np.ctypeslib.as_array(pointer, (self.config.vocab_size,)).copy()


@contextmanager
def _as_run(path: Path, numerics: Numerics, dtype: DtypeName) -> Iterator[tuple[Path, ModelConfig, LoadPath]]:
    """Yield the file that llama.cpp is given, the configuration and the load path.

    Raises:
        ValueError: ggml numerics with another dtype than float32, or without a GGUF file.
    """
    if numerics == EXACT:
        with float_gguf(path, dtype) as given:
            yield given
        return
    if dtype != "float32":
        raise UserError(f"llamacpp: ggml numerics need dtype float32, got {dtype}")
    if path.is_dir():
        raise UserError(f"{path}: ggml numerics need a GGUF file; make one with llorch convert")
    weights = open_weights(path)
    weights.source.close()
    yield path, weights.config, LoadPath("llamacpp", "llamacpp")


@contextmanager
def _loaded_model(
    path: Path, original: Path, dtype: DtypeName, *, vocab_only: bool = False
) -> Iterator[llama_cpp.llama_model_p]:
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
    params.use_extra_bufts = False
    params.vocab_only = vocab_only
    _errors.clear()
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        what = original if path == original else f"{original} as a {dtype} file"
        raise OSError(f"llama.cpp: cannot load {what}: {last_errors()}")
    try:
        yield model
    finally:
        llama_cpp.llama_model_free(model)


def _decode(
    context: llama_cpp.llama_context_p,
    ids: Sequence[int],
    *,
    first_position: int,
    all_logits: bool,
    watcher: GraphWatcher | None = None,
) -> None:
    """Run llama.cpp on some tokens, with logits of all or of the last one."""
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    try:
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i] = token
            batch.pos[i] = first_position + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = all_logits or i == len(ids) - 1
        _errors.clear()
        status = llama_cpp.llama_decode(context, batch)
    finally:
        llama_cpp.llama_batch_free(batch)
    if watcher is not None and watcher.error is not None:
        raise watcher.error
    if status != 0:
        raise RuntimeError(f"llama.cpp: decoding {len(ids)} tokens failed with status {status}: {last_errors()}")


@contextmanager
def _sampler_chain(settings: SamplingSettings, history: Sequence[int], *, n_vocab: int) -> Iterator[Any]:
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    parts = [
        llama_cpp.llama_sampler_init_penalties(n_vocab, len(history), settings.repetition_penalty, 0.0, 0.0),
        llama_cpp.llama_sampler_init_temp(settings.temperature),
        llama_cpp.llama_sampler_init_top_k(settings.top_k),
        llama_cpp.llama_sampler_init_top_p(settings.top_p, 1),
        llama_cpp.llama_sampler_init_min_p(settings.min_p, 1),
        llama_cpp.llama_sampler_init_dist(settings.seed),
    ]
    try:
        for part in parts:
            llama_cpp.llama_sampler_chain_add(chain, part)
        for token in history:
            llama_cpp.llama_sampler_accept(chain, token)
        yield chain
    finally:
        llama_cpp.llama_sampler_free(chain)


def last_errors() -> str:
    """Return the last error messages of llama.cpp, joined by semicolons."""
    return "; ".join(_errors) or "no reason given"


class LlamaCppWithAdapter(LlamaCpp):
    """The reference engine `llamacpp` with one adapter in every run; a context manager that frees the model."""

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
                raise RuntimeError(f"llama.cpp: cannot apply the adapter: {last_errors()}")
            yield context


def logits_with_adapter(
    model: str | Path, adapter: str | Path, ids: Sequence[int], *, numerics: Numerics = EXACT
) -> Float32[np.ndarray, "seq vocab"]:
    """Return the logits of every token from llama.cpp with a LoRA GGUF file."""
    with LlamaCppWithAdapter(model, adapter, numerics=numerics) as engine:
        return engine.logits(ids)
