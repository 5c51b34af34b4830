"""Exercises of lessons 09 to 14: the steps after the logits, quantised blocks, and torch.

Filters take and return float64 logits, as llorch's filters do; a removed token has -inf. The generation loop takes the
model as a function, and lesson 14 takes torch tensors, so only Python can solve these. Adapters get `call` (the
learner's function) and `right` (llorch's function, here also `our_x`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from llorch.apps.learn.exercise import Call, Exercise, by_keyword
from llorch.files.blocks import SCRATCH_BYTES, Chunk, Decoder
from llorch.files.blocks.uniform import decode_q4_0 as our_q4_0
from llorch.files.blocks.uniform import decode_q8_0 as our_q8_0
from llorch.model.generate import log_probability
from llorch.ops.sampling import SamplingSettings
from llorch.ops.sampling import greedy as our_greedy
from llorch.ops.sampling import keep_min_p as our_min_p
from llorch.ops.sampling import keep_top_k as our_top_k
from llorch.ops.sampling import keep_top_p as our_top_p
from llorch.ops.sampling import penalise as our_penalty
from llorch.ops.sampling import probabilities as our_probabilities
from llorch.ops.sampling import softmax as our_softmax
from llorch.runtime.errors import LearnerFault

Array = np.ndarray


def distribution(
    logits: Array, history: Array, penalty: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> Array:
    """Compute the distribution that a token is sampled from, for a temperature above 0."""
    settings = SamplingSettings(
        repetition_penalty=penalty, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    return our_probabilities(logits, settings, history.tolist())


def generate(step: Callable[[Any], Array], prompt: Array, max_tokens: int) -> Iterator[int]:
    """Yield greedy tokens; `step` runs new ids after those it has run, and returns the logits of the last position."""
    new = prompt.tolist()
    for _ in range(max_tokens):
        new = [our_greedy(step(new))]
        yield new[0]


def _row_adapted(call: Call, right: Call) -> Call:
    """Let the learner's function select the last row of `forward`'s logits, if llorch asks for that row only."""

    def adapted(*args: object, last_only: bool = False, **kwargs: object) -> Array:
        logits = right(*args, **kwargs)
        return call(logits=logits)[None] if last_only else logits

    return adapted


def _penalty_adapted(call: Call, right: Call) -> Call:
    return lambda logits, history, *, penalty: call(
        logits=logits, history=np.asarray(history, np.int64), penalty=penalty
    )


def _distribution_adapted(call: Call, right: Call) -> Call:
    """Let llorch call the learner's function, but `right` in greedy runs and with presence or frequency penalties."""

    def adapted(
        logits: Array, settings: SamplingSettings, history: Sequence[int], *, n_prompt: int | None = None
    ) -> Array:
        is_excluded = settings.temperature == 0 or settings.presence_penalty != 0 or settings.frequency_penalty != 0
        if is_excluded:
            return right(logits, settings, history, n_prompt=n_prompt)
        row, ids = logits.astype(np.float64), np.asarray(history, np.int64)
        return call(
            logits=row, history=ids, penalty=settings.repetition_penalty, temperature=settings.temperature,
            top_k=settings.top_k, top_p=settings.top_p, min_p=settings.min_p,
        ).astype(logits.dtype)  # fmt: skip

    return adapted


def _positions_adapted(call: Call, right: Call) -> Call:
    return lambda cache, n_tokens: call(n_before=int(right(cache, n_tokens)[0]), n_new=n_tokens)


def _generate_adapted(call: Call, right: Call) -> Call:
    """Let llorch call the learner's function for greedy runs without a penalty; LearnerFault for wrong tokens."""

    def adapted(
        step: Callable[[Sequence[int]], Array], prompt: Sequence[int], settings: SamplingSettings, *, max_tokens: int
    ) -> Iterator[tuple[int, float]]:
        if settings.temperature > 0 or settings.repetition_penalty != 1:
            yield from right(step, prompt, settings, max_tokens=max_tokens)
            return
        rows: list[Array] = []

        def run_step(new: Iterable[int]) -> Array:
            rows.append(step([int(token) for token in new]))
            return rows[-1].copy()

        tokens = iter(call(step=run_step, prompt=np.asarray(prompt, np.int64), max_tokens=max_tokens))
        for index, token in enumerate(islice(tokens, max_tokens)):
            if not (rows and 0 <= token < rows[-1].size):
                raise LearnerFault(
                    "generate", f"gave {token}" + (", which is no token id" if rows else " without a call of the step")
                )
            yield token, log_probability(rows[min(index, len(rows) - 1)], token)
        if next(tokens, None) is not None:
            raise LearnerFault("generate", f"expected at most max_tokens = {max_tokens} ids, got more")

    return adapted


LAST_ROW = Exercise(
    name="last_row", reference=lambda logits: logits[-1].copy(), returns=("row",), adapt=_row_adapted,
    replaces="llorch.model.blocks.forward",
)  # fmt: skip
ARGMAX = Exercise(
    name="argmax", reference=lambda row: our_greedy(row), returns=("id",), replaces="llorch.ops.sampling.greedy",
    adapt=lambda call, right: lambda logits: int(call(row=logits)),
)  # fmt: skip
PENALISE = Exercise(
    name="penalise", reference=lambda logits, history, penalty: our_penalty(logits, history.tolist(), penalty=penalty),
    returns=("logits",), replaces="llorch.ops.sampling.penalise", adapt=_penalty_adapted,
)  # fmt: skip
KEEP_TOP_K = Exercise(
    name="keep_top_k", reference=lambda logits, k: our_top_k(logits, k=k), returns=("logits",),
    replaces="llorch.ops.sampling.keep_top_k", adapt=by_keyword("logits"),
)  # fmt: skip
KEEP_TOP_P = Exercise(
    name="keep_top_p", reference=lambda logits, p: our_top_p(logits, p=p), returns=("logits",),
    replaces="llorch.ops.sampling.keep_top_p", adapt=by_keyword("logits"),
)  # fmt: skip
KEEP_MIN_P = Exercise(
    name="keep_min_p", reference=lambda logits, min_p: our_min_p(logits, min_p=min_p), returns=("logits",),
    replaces="llorch.ops.sampling.keep_min_p", adapt=by_keyword("logits"),
)  # fmt: skip
SOFTMAX = Exercise(
    name="softmax", reference=lambda logits: our_softmax(logits), returns=("probabilities",),
    replaces="llorch.ops.sampling.softmax", adapt=by_keyword("logits"),
)  # fmt: skip
DISTRIBUTION = Exercise(
    name="distribution", reference=distribution, returns=("probabilities",),
    replaces="llorch.ops.sampling.probabilities", adapt=_distribution_adapted,
)  # fmt: skip
POSITIONS = Exercise(
    name="positions", reference=lambda n_before, n_new: np.arange(n_before, n_before + n_new), returns=("positions",),
    replaces="llorch.model.cache.KVCache.next_positions", adapt=_positions_adapted,
)  # fmt: skip
GENERATE = Exercise(
    name="generate", reference=generate, returns=("ids",), streams=True, replaces="llorch.model.generate.sample_ids",
    adapt=_generate_adapted,
)  # fmt: skip


BLOCK_SIZE = 32  # values per block of Q8_0 or Q4_0


def _make_reference(decode: Decoder) -> Callable[[np.ndarray], np.ndarray]:
    def reference(blocks: np.ndarray) -> np.ndarray:
        values = np.empty((len(blocks), BLOCK_SIZE), np.float32)
        decode(Chunk(blocks, np.empty(values.size * SCRATCH_BYTES, np.uint8)), values)
        return values

    return reference


def _decoder_adapted(call: Call, right: Call) -> Call:
    def adapted(chunk: Chunk, out: np.ndarray) -> None:
        out[...] = call(blocks=chunk.blocks)

    return adapted


Q8_0 = Exercise(
    name="q8_0", reference=_make_reference(our_q8_0), returns=("values",), adapt=_decoder_adapted,
    replaces="llorch.files.blocks.uniform.decode_q8_0",
)  # fmt: skip
Q4_0 = Exercise(
    name="q4_0", reference=_make_reference(our_q4_0), returns=("values",), adapt=_decoder_adapted,
    replaces="llorch.files.blocks.uniform.decode_q4_0",
)  # fmt: skip


Tensor = Any  # of torch, which only lesson 14 imports


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm to the last axis in float32 or wider, and round once."""
    from llorch.apps.learn.on_torch import our_rms_norm

    return our_rms_norm(x, weight, eps=eps)


def torch_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to every head of a batch in float32 or wider, and round once."""
    from llorch.apps.learn.on_torch import our_rope

    return our_rope(x, cos, sin)


TORCH_RMS_NORM = Exercise(
    name="torch_rms_norm", reference=torch_rms_norm, returns=("y",), on_torch=True,
    replaces="llorch.pytorch.causal_lm.rms_norm", stages=("attn_norm", "ffn_norm", "final_norm", "q_norm", "k_norm"),
    adapt=lambda call, right: lambda x, weight, *, eps: call(x=x, weight=weight.detach(), eps=eps),
)  # fmt: skip
TORCH_ROPE = Exercise(
    name="torch_rope", reference=torch_rope, returns=("y",), on_torch=True, replaces="llorch.pytorch.causal_lm.rope",
    stages=("q_rope", "k_rope"), adapt=by_keyword("x", "cos", "sin"),
)  # fmt: skip
