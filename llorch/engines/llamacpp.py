"""Reference engine llama.cpp: an unmodified build, observed through its scheduler callback.

Everything that could change float32 results is switched off: weights and KV cache are F32, no flash attention, no
repacked weights, one micro-batch, no GPU. llama.cpp's CPU backend rounds *activations* to suit the type of the weights
if these are F16, BF16 or quantised, with errors near 1e-2. With `EXACT` numerics, llama.cpp's quantiser therefore
writes a temporary F32 file first. With `GGML` numerics, which keep this rounding, llama.cpp gets the unchanged file.
For bfloat16 or float16 it gets a temporary file in that dtype (see f32_copy): products round their inputs to it,
everything else stays float32.
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
from llorch.engines.interface import Call, LoadPath, Trace, call_each, check_ids, checked_trace
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
# Settings that `_context` and `_load_model` set, for the provenance; extra buffer types are repacked weights.
KNOBS = {"flash_attn": "disabled", "use_extra_bufts": False, "n_gpu_layers": 0, "n_ubatch": "all tokens"}

TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data

_errors: deque[str] = deque(maxlen=4)  # last error lines of llama.cpp, for exceptions


@llama_cpp.llama_log_callback
def _log(level: int, text: bytes, _user_data: int | None) -> None:
    """Replace llama.cpp's log function: record the last errors, and send lines, but no continuations, to debug."""
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
        """Load a model; `GGML` numerics need a GGUF file and use its types."""
        ggml_tensor.check_layout()
        llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.path = Path(path)
        self.numerics = numerics
        self.dtype: DtypeName = dtype
        with ExitStack() as resources:
            run_path, self.config, self.load_path = resources.enter_context(_open_run_file(self.path, numerics, dtype))
            self.n_threads = n_threads or n_threads_for(count_parameters(self.config))
            model = vocabulary = resources.enter_context(_load_model(run_path, self.path, dtype))
            if run_path != self.path and self.path.is_file():
                vocabulary = resources.enter_context(_load_model(self.path, self.path, dtype, vocab_only=True))
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
        """Return the model, or with `for_text` the model with the vocabulary; raise ValueError after `close`."""
        if self._models is None:
            raise ValueError("llamacpp: the engine is closed")
        return self._models[1 if for_text else 0]

    def trace(self, ids: Sequence[int], *, first_position: int = 0) -> Trace:
        """Run the tokens from an empty cache; return every stage (named intermediate array, see `stages.table`)."""
        capture = GraphCapture(self.config, len(ids))
        self._logits(ids, first_position, GraphWatcher(capture))
        return checked_trace(capture.stages(), self.config, len(ids), self.name)

    def logits(self, ids: Sequence[int], *, first_position: int = 0) -> np.ndarray:
        """Return the logits of every token from a run without capture, bit-identical to the logits of `trace`."""
        return self._logits(ids, first_position, None)

    def selected_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Compute the logits that llama.cpp's sampler reads: those of the last token, the only ones computed."""
        check_ids(ids, self.config)
        with self._context(len(ids)) as context:
            _decode(context, ids, first_position=0, all_logits=False)
            return self._copy_logits(context, -1)

    def greedy(self, ids: Sequence[int], n: int) -> list[int]:
        """Generate `n` tokens with llama.cpp's greedy sampler and KV cache; EOS does not stop it."""
        check_ids(ids, self.config)
        sampler = llama_cpp.llama_sampler_init_greedy()
        token_ids: list[int] = []
        try:
            with self._context(len(ids) + n) as context:
                new_ids, position = list(ids), 0
                while len(token_ids) < n:
                    _decode(context, new_ids, first_position=position, all_logits=False)
                    position += len(new_ids)
                    new_ids = [llama_cpp.llama_sampler_sample(sampler, context, -1)]
                    token_ids += new_ids
        finally:
            llama_cpp.llama_sampler_free(sampler)
        return token_ids

    def call_batch(self, calls: Sequence[Call]) -> list[Any]:
        """Return the result of each call, one after the other."""
        return call_each(self, calls)

    def probabilities(self, logits: np.ndarray, settings: SamplingSettings, history: Sequence[int]) -> np.ndarray:
        """Compute the distribution from which llama.cpp's sampler chain draws.

        The chain is penalty, temperature, top-k, top-p, min-p, draw. The draw writes normalized probabilities, which
        are read back; tokens that the chain removed get 0.
        """
        candidates = np.zeros(len(logits), TOKEN_DATA)
        candidates["id"], candidates["logit"] = np.arange(len(logits)), logits
        pointer = candidates.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
        # The fields are data, size, selected and sorted; `size` shrinks when the chain removes candidates.
        array = (llama_cpp.llama_token_data_array * 1)((pointer, len(logits), -1, False))
        with _sampler_chain(settings, history, n_vocab=len(logits)) as chain:
            llama_cpp.llama_sampler_apply(chain, array)
        remaining = candidates[: array[0].size]  # the chain moves remaining candidates to the front
        probabilities = np.zeros(len(logits), np.float32)
        probabilities[remaining["id"]] = remaining["p"]
        return probabilities

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int] | None:
        """Return the token ids of llama.cpp's tokenizer; None for a file without a vocabulary."""
        vocabulary = llama_cpp.llama_model_get_vocab(self._model(for_text=True))
        assert vocabulary is not None
        if llama_cpp.llama_vocab_type(vocabulary) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
            return None
        utf8 = text.encode()
        room = len(utf8) + 8  # a token covers at least one byte; special tokens need extra room
        buffer = (llama_cpp.llama_token * room)()
        n_tokens = llama_cpp.llama_tokenize(vocabulary, utf8, len(utf8), buffer, room, add_special, parse_special)
        if n_tokens < 0:
            raise RuntimeError(f"llama.cpp: {len(utf8)} bytes of text need {-n_tokens} tokens, expected up to {room}")
        return list(buffer[:n_tokens])

    def provenance(self) -> dict[str, object]:
        """Return the versions and settings that a golden must record."""
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
            return np.stack([self._copy_logits(context, i) for i in range(len(ids))])

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

    def _copy_logits(self, context: llama_cpp.llama_context_p, i: int) -> np.ndarray:
        pointer = llama_cpp.llama_get_logits_ith(context, i)
        return np.ctypeslib.as_array(pointer, (self.config.vocab_size,)).copy()


@contextmanager
def _open_run_file(path: Path, numerics: Numerics, dtype: DtypeName) -> Iterator[tuple[Path, ModelConfig, LoadPath]]:
    """Yield the file that llama.cpp loads, the configuration and the load path; UserError if numerics do not fit."""
    if numerics == EXACT:
        with float_gguf(path, dtype) as copy:
            yield copy
        return
    if dtype != "float32":
        raise UserError(f"llamacpp: ggml numerics need dtype float32, got {dtype}")
    if path.is_dir():
        raise UserError(f"{path}: ggml numerics need a GGUF file; make one with llorch convert")
    weights = open_weights(path)
    weights.source.close()
    yield path, weights.config, LoadPath("llamacpp", "llamacpp")


@contextmanager
def _load_model(
    path: Path, original: Path, dtype: DtypeName, *, vocab_only: bool = False
) -> Iterator[llama_cpp.llama_model_p]:
    """Load a GGUF file with memory mapping and free it after use; `original` and `dtype` are for the error message."""
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
    params.use_extra_bufts = False
    params.vocab_only = vocab_only
    _errors.clear()
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        description = original if path == original else f"{original} as a {dtype} file"
        raise OSError(f"llama.cpp: cannot load {description}: {last_errors()}")
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
    """Run llama.cpp on some tokens; compute the logits of all tokens or of the last one."""
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    try:
        batch.n_tokens = len(ids)
        for index, token_id in enumerate(ids):
            batch.token[index] = token_id
            batch.pos[index] = first_position + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = all_logits or index == len(ids) - 1
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
    samplers = [
        llama_cpp.llama_sampler_init_penalties(n_vocab, len(history), settings.repetition_penalty, 0.0, 0.0),
        llama_cpp.llama_sampler_init_temp(settings.temperature),
        llama_cpp.llama_sampler_init_top_k(settings.top_k),
        llama_cpp.llama_sampler_init_top_p(settings.top_p, 1),
        llama_cpp.llama_sampler_init_min_p(settings.min_p, 1),
        llama_cpp.llama_sampler_init_dist(settings.seed),
    ]
    try:
        for sampler in samplers:
            llama_cpp.llama_sampler_chain_add(chain, sampler)
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
        # llama.cpp frees the adapter together with the model.
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
