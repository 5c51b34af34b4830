"""Verification under ggml numerics: our pass over a file as it is stored, against llama.cpp running that very file.

llama.cpp rounds the inputs of every product to a few bits. A value that lies on the edge between two codes may fall to
one side there and to the other here, for a difference in the seventh digit; a whole code is then added to the sum and
all later stages differ by what quantisation costs. *Chained*, such values are found (the two sides round to different
numbers), counted, and replaced by the golden's, so that the chain stays as tight as the isolated stages and a flip is
shown instead of being hidden in a tolerance. What a run without replacing gives is noted beside the logits.

Source: llama.cpp ggml/src/ggml-cpu; llorch.ops.rounding.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from llorch.cache import KVCache
from llorch.compare import Difference, measure
from llorch.evidence import Tolerances
from llorch.forward import forward
from llorch.ops.rounding import BLOCK_SIZE, ActivationKind, block_sums, round_activations
from llorch.replay import isolated
from llorch.stages import STAGES, input_key, key, keys, matrix_of
from llorch.truth import distance
from llorch.verifier import FAIL, TIE, Row, Verifier, run
from llorch.weights import Weights
from llorch.weights.quant import ACTIVATION_TYPE

BACKEND = "numpy-ggml"
CHECKPOINT = "13"
EDGE = 2.0**-13  # a quarter of the smallest step of any rounding, relative to the value or to its block's largest

# What a float16 cache rounds: stage -> the input of its that is rounded.
CACHE_ROUNDS = {"k_cache": "k_rope", "v_cache": "v_proj", "attn_scores": "q_rope", "attn_context": "attn_probs"}

# Products with a matrix, and what goes into them.
PRODUCTS = {name for stage in STAGES if stage.matrix for name in (stage.name, stage.inputs[0])}


class QuantisedVerifier(Verifier):
    """Judges our forward pass under ggml numerics against llama.cpp, the only engine that has them."""

    def __init__(self, name: str, weights: Weights, cases: Mapping, evidence: Mapping) -> None:
        """As `Verifier`; the numerics are those of the weights.

        Args:
            name: Name of the model in the rows.
            weights: The model in float32, with its numerics.
            cases: The inputs; `near` ends in llama.cpp's greedy continuation, but for its last token.
            evidence: What llama.cpp showed for them.
        """
        super().__init__(name, weights, cases, evidence, None)
        self.backend = BACKEND
        self._golden = evidence["llamacpp"]
        self._rounded = rounded_stages(weights)
        self._flips: dict[str, dict[str, int]] = {}  # case -> stage key -> values

    def stage_rows(self, tolerances: Tolerances) -> Iterator[Row]:
        """Every stage and layer, isolated and chained; chained rows count the flips of the stage."""
        for row in super().stage_rows(tolerances):
            if row.mode != "chained":
                yield row
                continue
            note = self._as_it_runs(row.case) if row.stage == "logits" and not row.note else row.note
            yield replace(row, flips=self._flips[row.case].get(key(row.stage, row.layer), 0), note=note)

    def sampler_rows(self, tolerances: Tolerances) -> Iterator[Row]:
        """Checkpoints 09 to 12, where llama.cpp is also held against its own single pass."""
        for row in super().sampler_rows(tolerances):
            failed = row.verdict == FAIL and row.checkpoint in ("09", "10", "12")
            yield self._against_one_pass(row, tolerances) if failed else row

    def _against_one_pass(self, row: Row, tolerances: Tolerances) -> Row:
        """Values flip inside llama.cpp too, so that it differs from its own pass over all tokens, which ours equals.

        With one row of logits, or token by token, it adds in another order than with many rows.
        """
        single = self._golden.traces["near"]["logits"]
        ours = self._run(self.weights, "near")["logits"]
        same = {
            "09": measure(ours[-1], single[-1]).within(tolerances["near"]["chained"]["logits"]),
            "10": ours[-1].argmax() == single[-1].argmax(),
            "12": np.array_equal(*(array[-len(self._golden.greedy) :].argmax(axis=-1) for array in (ours, single))),
        }
        if not same[row.checkpoint]:
            return row
        note = f"{row.note or f'error {row.error:.1e}'}; ours is what llama.cpp gives when it computes all rows at once"
        return replace(row, verdict=TIE, note=note)

    def _as_it_runs(self, case: str) -> str:
        free = measure(run(self.weights, self.cases[case])["logits"], self._golden.traces[case]["logits"])
        flips = sum(self._flips[case].values())
        return f"{flips} values flip; as it runs, with nothing replaced: error {free.error:.1e}"

    def _last_row(self) -> np.ndarray:
        return self._run(self.weights, "near")["logits"][-1]

    def _run_isolated(self, case: str, golden: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return self._stages_alone(self.weights, case, golden)

    def _stages_alone(self, weights: Weights, case: str, golden: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {
            name: isolated(stage, layer, golden, weights, self.cases[case]).astype(weights.dtype, copy=False)
            for name, stage, layer in self._keys
            if stage.matrix or f"{name.partition('.')[0]}.k_cache" in golden or layer is None
        }

    @cached_property
    def truth(self) -> Mapping[str, Mapping[str, np.ndarray]]:
        """Our float64 trace of every case."""
        return {name: self._run(self.wide, name) for name in self.cases}

    def _distance(self, producer: str, case: str, mode: str, key: str) -> Difference:
        trace = self.evidence[producer].traces[case]
        true = self.truth[case] if mode == "chained" else self._true_stages[case]
        return distance(trace[key], true[key], key) if key in true else Difference(0.0, 0.0)

    @cached_property
    def _true_stages(self) -> Mapping[str, Mapping[str, np.ndarray]]:
        return {case: self._stages_alone(self.wide, case, self._golden.traces[case]) for case in self.cases}

    def _greedy(self, n_tokens: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """The argmax at each of llama.cpp's own tokens: `near` ends in its continuation, but for the last token."""
        seen = list(self._run(self.weights, "near")["logits"][-n_tokens:])
        return np.asarray([int(np.argmax(row)) for row in seen], np.int64), seen

    def _run(self, weights: Weights, case: str, *, n_cached: int = 0) -> dict[str, np.ndarray]:
        this = self.cases[case]
        cache = KVCache(weights.config, weights.cache_dtype, first_position=this.first_position)
        trace: dict[str, np.ndarray] = {}
        flips: dict[str, int] = {}
        bounds = [0, *([n_cached] if n_cached else []), len(this.ids)]
        for start, stop in pairwise(bounds):

            def keep(name: str, array: np.ndarray, start: int = start, stop: int = stop) -> np.ndarray:
                trace[name] = array.astype(weights.dtype, copy=False)
                return self._adopted(case, name, array, start, stop, flips)

            forward(np.asarray(this.ids[start:stop]), weights, cache, keep=keep)
        if not n_cached and weights.dtype == np.float32:
            self._flips[case] = flips
        return trace

    def _adopted(
        self, case: str, name: str, array: np.ndarray, start: int, stop: int, flips: dict[str, int]
    ) -> np.ndarray:
        for kind in self._rounded.get(name, ()):
            golden = _tokens(self._golden.traces[case][name], name, start, stop).reshape(array.shape)
            array, n = adopt_edges(array, golden, kind)
            flips[name] = flips.get(name, 0) + n
        return array


def rounded_stages(weights: Weights) -> dict[str, set[ActivationKind]]:
    """Which stages are rounded before they are multiplied, and to what.

    Args:
        weights: The model, with its numerics.

    Returns:
        Stage key to activation types; a stage that nothing rounds is absent.
    """
    found: dict[str, set[ActivationKind]] = {}
    config = weights.config
    for _, stage, layer in keys(config):
        if stage.matrix:
            matrix = (weights if layer is None else weights.layer(layer))[matrix_of(stage, config)]
            kind = "F32" if isinstance(matrix, np.ndarray) else matrix.activations
            if kind != "F32":
                found.setdefault(input_key(stage.inputs[0], layer, config), set()).add(kind)
        elif stage.name in CACHE_ROUNDS and weights.cache_dtype is np.float16:
            found.setdefault(input_key(CACHE_ROUNDS[stage.name], layer, config), set()).add("F16")
    return found


def adopt_edges(ours: np.ndarray, golden: np.ndarray, kind: ActivationKind) -> tuple[np.ndarray, int]:
    """Take over the golden's values wherever the two sides round to different numbers.

    Args:
        ours: A stage of ours, before it is rounded.
        golden: The same stage of the golden.
        kind: What it is rounded to.

    Returns:
        Ours, with every block that holds a flip (for F16 and BF16 every such value) replaced; and how many values
        flipped.
    """
    size = BLOCK_SIZE.get(kind, 1)
    theirs = golden.astype(ours.dtype)
    a, b = (round_activations(x, kind).reshape(-1, size) for x in (ours, theirs))
    flipped = np.abs(a - b) > EDGE * np.abs(b).max(axis=-1, keepdims=True)
    in_block = flipped.any(axis=-1)
    n_flips = int(flipped.sum())
    if kind == "Q8_1":
        one, other = block_sums(ours).reshape(-1), block_sums(theirs).reshape(-1)
        sums = (np.abs(one - other) > EDGE * np.abs(other)) & ~in_block
        in_block |= sums
        n_flips += int(sums.sum())
    if not n_flips:
        return ours, 0
    mixed = np.where(in_block[:, None], theirs.reshape(-1, size), ours.reshape(-1, size))
    return mixed.reshape(ours.shape), n_flips


def emulated(weights: Weights) -> str:
    """Name what is rounded in this file: `Q4_K, Q6_K: inputs rounded to Q8_K`.

    Args:
        weights: The model, with its numerics.

    Returns:
        One line; empty when nothing is rounded.
    """
    types: dict[str, set[str]] = {}
    for name in weights:
        stored = weights.stored_type(name)
        if len(weights.shape(name)) == 2 and ACTIVATION_TYPE[stored] != "F32":
            types.setdefault(ACTIVATION_TYPE[stored], set()).add(stored.name)
    parts = [f"{', '.join(sorted(stored))}: inputs rounded to {kind}" for kind, stored in sorted(types.items())]
    if weights.cache_dtype is np.float16:
        parts.append("cache F16: queries and probabilities rounded to F16")
    return "; ".join(parts)


def _tokens(array: np.ndarray, name: str, start: int, stop: int) -> np.ndarray:
    """The part of a whole pass's stage that belongs to tokens `start` to `stop`, seen from `stop`."""
    if name.endswith("attn_probs"):
        return array[:, start:stop, :stop]  # (heads, seq, ctx)
    return array[start:stop]
