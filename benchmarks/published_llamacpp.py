"""Texts by llama.cpp, and logits of several ways to run a prompt; for `published_texts.py`.

It runs in a child process for engines.
"""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import llama_cpp
import numpy as np

from llorch.engines import llamacpp


class Texts:
    """Model with plain weights and, for one comparison, with weights repacked for the processor."""

    def __init__(self, path: Path, n_threads: int) -> None:
        """Load the model twice; weights that repacking does not change are mapped once."""
        with ExitStack() as resources:
            self._plain = resources.enter_context(llamacpp.LlamaCpp(path, n_threads=n_threads))
            default = llama_cpp.llama_model_default_params()
            default.n_gpu_layers, default.use_extra_bufts = 0, True
            repacked = llama_cpp.llama_model_load_from_file(bytes(path), default)
            if not repacked:
                raise OSError(f"llama.cpp: cannot load {path} repacked: {llamacpp.last_errors()}")
            resources.callback(llama_cpp.llama_model_free, repacked)
            self._repacked = repacked
            self._n_threads, self._resources = n_threads, resources.pop_all()

    def close(self) -> None:
        """Free both models."""
        self._resources.close()

    def greedy_batch(self, prompts: Sequence[Sequence[int]], n: int) -> list[list[int]]:
        """Continue many prompts at once by `n` tokens; EOS does not stop it."""
        texts: list[list[int]] = [[] for _ in prompts]
        n_context = max(map(len, prompts)) + n
        with closing(_Context(self._plain._model(), len(prompts), n_context, self._n_threads)) as context:
            steps = [list(prompt) for prompt in prompts]
            for _ in range(n):
                tokens = [int(row.argmax()) for row in context.logits(steps)]
                for text_ids, token in zip(texts, tokens, strict=True):
                    text_ids.append(token)
                steps = [[token] for token in tokens]
        return texts

    def runs(self, ids: Sequence[int]) -> dict[str, np.ndarray]:
        """Compute the logits of the last token in several runs of llama.cpp."""
        logits: dict[str, np.ndarray] = {}
        for name, model, parts in (
            ("one pass", self._plain._model(), [ids]),
            ("cached", self._plain._model(), [ids[:-1], ids[-1:]]),
            ("repacked", self._repacked, [ids]),
            ("repacked, cached", self._repacked, [ids[:-1], ids[-1:]]),
        ):
            with closing(_Context(model, 1, len(ids), self._n_threads)) as context:
                for part in parts:
                    logits[name] = context.logits([part])[0]
        return logits


class _Context:
    """llama.cpp context with a KV cache for each of several texts."""

    def __init__(self, model: llama_cpp.llama_model_p, n_texts: int, room: int, n_threads: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max, params.n_ctx = n_texts, n_texts * room
        params.n_batch = params.n_ubatch = n_texts * room
        params.n_threads = params.n_threads_batch = n_threads
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.kv_unified = False
        params.offload_kqv = params.op_offload = False
        context, vocabulary = llama_cpp.llama_init_from_model(model, params), llama_cpp.llama_model_get_vocab(model)
        if not context or not vocabulary:
            raise RuntimeError(f"llama.cpp: no context for {n_texts} texts: {llamacpp.last_errors()}")
        self._context, self._lengths = context, [0] * n_texts
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def close(self) -> None:
        llama_cpp.llama_free(self._context)

    def logits(self, steps: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Run the next tokens of every text; return the logits of each text's last token."""
        batch = llama_cpp.llama_batch_init(sum(map(len, steps)), 0, 1)
        ends, n_tokens = [], 0
        try:
            for text, step in enumerate(steps):
                for token in step:
                    batch.token[n_tokens], batch.pos[n_tokens] = token, self._lengths[text]
                    batch.n_seq_id[n_tokens], batch.seq_id[n_tokens][0], batch.logits[n_tokens] = 1, text, False
                    self._lengths[text] += 1
                    n_tokens += 1
                batch.logits[n_tokens - 1] = True
                ends.append(n_tokens - 1)
            batch.n_tokens = n_tokens
            if status := llama_cpp.llama_decode(self._context, batch):
                raise RuntimeError(f"llama.cpp: status {status}: {llamacpp.last_errors()}")
        finally:
            llama_cpp.llama_batch_free(batch)
        rows = (llama_cpp.llama_get_logits_ith(self._context, end) for end in ends)
        return [np.ctypeslib.as_array(row, (self._n_vocab,)).copy() for row in rows]
