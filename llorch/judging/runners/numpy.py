"""The NumPy forward pass as a runner; under ggml numerics beside llama.cpp running the very file.

llama.cpp rounds the inputs of every product to a few bits. A value that lies on the edge between two codes may fall to
one side there and to the other here, for a difference in the seventh digit; a whole code is then added to the sum and
all later stages differ by what quantisation costs. *Chained* and after a cache, such values are found (the two sides
round to different numbers), counted, and replaced by the golden's, so that the chain stays as tight as the isolated
stages. Only a value that was within the limit *before* it was rounded is at an edge: anything else stays ours and fails
its row.

Source: llama.cpp ggml/src/ggml-cpu; llorch.ops.rounding.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import pairwise

import numpy as np

from llorch.files import Weights
from llorch.files.quant import ACTIVATION_TYPE
from llorch.judging.expert_selection import StageOverride, as_made
from llorch.judging.goldens.forward import SAMPLINGS
from llorch.judging.runners import StageObserver, Trace
from llorch.judging.tolerances.forward import ForwardTolerances, off
from llorch.model.blocks import forward
from llorch.model.cache import KVCache
from llorch.model.forward import Keep
from llorch.model.generate import IdsOnly, sample_ids
from llorch.model.model import Model
from llorch.ops.numerics import DtypeName
from llorch.ops.precision import own_dtype_only
from llorch.ops.rounding import BLOCK_SIZE, ActivationKind, block_sums, round_activations
from llorch.ops.sampling import SamplingSettings, probabilities
from llorch.runtime.memory import available_memory
from llorch.stages.stage_ref import Pass, has_tokens, part_of, token_axis
from llorch.stages.table import input_keys, key, keys, matrix_of

OWN_SUMS = "numpy-float32"  # every sum in float32, which is how larger models run
FLOAT64 = "numpy-float64"  # the same code in float64, judged by the float64 reference alone
BACKENDS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {  # in float32
    "numpy": nullcontext,  # as it runs: small sums in float64
    OWN_SUMS: own_dtype_only,
}
GGML = "numpy-ggml"
EDGE = 2.0**-13  # a quarter of the smallest step of any rounding, relative to the value or to its block's largest

CACHE_ROUNDS = frozenset({"k_cache", "v_cache", "attn_scores", "attn_context"})  # a float16 cache: their first input


def run(weights: Weights, this: Pass, *, n_cached: int = 0, golden: Trace | None = None) -> dict[str, np.ndarray]:
    """Trace llorch's forward pass, by stage key; with `n_cached` the second of two passes, behind so many tokens.

    The golden replaces each stage as soon as it was recorded, so that every stage is isolated.
    """
    trace: dict[str, np.ndarray] = {}
    show(weights, this, trace.__setitem__, n_cached=n_cached, golden=golden)
    return trace


def show(
    weights: Weights,
    this: Pass,
    observe: Callable[[str, np.ndarray], None],
    *,
    n_cached: int = 0,
    golden: Trace | None = None,
    override: StageOverride = as_made,
    after_failure: bool = False,
) -> None:
    """Show the trace of `run` stage by stage; a stage without a golden goes on with what `override` returns.

    With `after_failure` a pass of other tokens fails before the second pass.
    """
    whole = _of_this_shape(golden or {}, weights, this)

    def keeping(start: int, stop: int) -> Keep:
        def keep(name: str, array: np.ndarray) -> np.ndarray:
            if start == n_cached:
                observe(name, array)
            if name not in whole:
                return override(name, array, start)
            stage, theirs = whole[name]
            if stop < len(this.ids) and not has_tokens(stage):
                return array  # the golden has it behind all tokens only
            return part_of(stage, theirs, start, stop).astype(array.dtype)

        return keep

    _passes(weights, this, n_cached, keeping, after_failure=after_failure)


def _of_this_shape(golden: Trace, weights: Weights, this: Pass) -> dict:
    """Map stage keys to stage and golden, where the golden has the shape that it must have."""
    n = len(this.ids)
    return {
        name: (stage, golden[name])
        for name, stage, _ in keys(weights.config)
        if name in golden and golden[name].shape == stage.shape(weights.config, seq=n, ctx=n)
    }


def _passes(
    weights: Weights, this: Pass, n_cached: int, keeping: Callable[[int, int], Keep], *, last_only: bool = False,
    after_failure: bool = False,
) -> np.ndarray:  # fmt: skip
    """Run one pass, or two if some tokens are cached; return the logits of the last pass."""
    cache = KVCache.of(weights, first_position=this.first_position)
    ids, bounds = np.asarray(this.ids), [0, *([n_cached] if n_cached else []), len(this.ids)]
    logits = np.empty(0)
    for start, stop in pairwise(bounds):
        if start and after_failure:
            _fail(ids[start:stop][::-1], weights, cache)
        logits = forward(ids[start:stop], weights, cache, keep=keeping(start, stop), last_only=last_only)
    return logits


class _PassFailedError(Exception):
    """A pass ends in the middle, as by an interrupt."""


def _fail(ids: np.ndarray, weights: Weights, cache: KVCache) -> None:
    """Begin a pass and end it after the first layer with a state; nothing of it may be left in the cache."""
    layers = range(weights.config.n_layers)
    last = key("block_out", next((i for i in layers if weights.config.layer(i).mixer == "delta_net"), 0))

    def keep(name: str, array: np.ndarray) -> np.ndarray:
        if name == last:
            raise _PassFailedError
        return array

    with suppress(_PassFailedError):
        forward(ids, weights, cache, keep=keep)


class NumpyRunner:
    """Our forward pass with exact numerics."""

    hidden: frozenset[str] = frozenset()

    def __init__(self, weights: Weights, name: str = "numpy") -> None:
        """Take float32 weights; `name` is `numpy` (as it runs: small sums in float64), `OWN_SUMS` or `FLOAT64`."""
        self.name = name
        self.dtype: DtypeName = "float64" if name == FLOAT64 else "float32"
        self.weights = weights
        if name == FLOAT64:
            n_bytes = 8 * sum(math.prod(weights.shape(weight)) for weight in weights)
            self.weights = weights.astype(np.float64, keep=n_bytes < available_memory() / 2)

    def arithmetic(self) -> AbstractContextManager[None]:
        """Return the context of the backend: sums in float32 for `OWN_SUMS`."""
        return BACKENDS.get(self.name, nullcontext)()

    def isolated(self, this: Pass, golden: Trace, observe: StageObserver) -> None:
        """See `run`."""
        show(self.weights, this, observe, golden=golden)

    def chained(
        self, case: str, this: Pass, observe: StageObserver, *, n_cached: int = 0, override: StageOverride = as_made
    ) -> None:
        """See `run`; the second of two passes comes after one that failed."""
        show(self.weights, this, observe, n_cached=n_cached, override=override, after_failure=True)

    def in_parts(self, this: Pass, bounds: Sequence[int], observe: Callable[[str, np.ndarray, int], None]) -> None:
        """See `Runner.in_parts`."""
        cache = KVCache.of(self.weights, first_position=this.first_position)
        for start, stop in pairwise(bounds):

            def keep(name: str, array: np.ndarray, stop: int = stop) -> np.ndarray:
                observe(name, array, stop)
                return array

            forward(np.asarray(this.ids[start:stop]), self.weights, cache, keep=keep)

    def last_row(self, this: Pass, override: StageOverride = as_made) -> np.ndarray:
        """Compute the last row of logits as generation computes it."""
        keep = lambda name, array: override(name, array, 0)  # noqa: E731
        return forward(np.asarray(this.ids), self.weights, KVCache.of(self.weights), keep=keep, last_only=True)[0]

    def probabilities(self, logits: np.ndarray, history: Sequence[int]) -> Mapping[str, np.ndarray]:
        """Compute the distributions by llorch's sampler."""
        rows = logits.astype(self.weights.dtype)
        return {name: probabilities(rows, settings, history) for name, settings in SAMPLINGS.items()}

    def text(self, prompt: Sequence[int], n_tokens: int) -> np.ndarray:
        """Generate the text by llorch's loop, one step after the other."""
        sampled = sample_ids(self._step(KVCache.of(self.weights)), prompt, SamplingSettings(), max_tokens=n_tokens)
        return np.asarray([token for token, _ in sampled], np.int64)

    def _step(self, cache: KVCache) -> Callable[[Sequence[int]], np.ndarray]:
        """Return the function that feeds new tokens and returns the last one's logits."""
        return lambda new: forward(np.asarray(new), self.weights, cache, last_only=True)[0]


def numpy_runners(weights: Weights, *, wide: bool) -> Iterator[NumpyRunner]:
    """Yield a runner for each way to run the NumPy path; in float64 if there is a float64 reference."""
    yield from (NumpyRunner(weights, name) for name in (*BACKENDS, *([FLOAT64] if wide else [])))


class GgmlRunner(NumpyRunner):
    """Our forward pass under ggml numerics, beside llama.cpp's."""

    def __init__(
        self,
        weights: Weights,
        goldens: Mapping[str, Trace],
        tolerances: Mapping[str, ForwardTolerances],
        name: str = GGML,
    ) -> None:
        """Take weights with their numerics, llama.cpp's traces by case, and the tolerances derived from the traces."""
        super().__init__(weights, name)
        self._goldens, self._limits = goldens, tolerances
        self._rounded = rounded_stages(weights)
        self._stages = {name: stage for name, stage, _ in keys(weights.config)}

    def isolated(self, this: Pass, golden: Trace, observe: StageObserver) -> None:
        """Run a pass as `NumpyRunner.isolated` does; a float16 cache shows as float32, the golden's dtype."""
        show(self.weights, this, lambda name, array: observe(name, self._in_own_dtype(array)), golden=golden)

    def chained(
        self, case: str, this: Pass, observe: StageObserver, *, n_cached: int = 0, override: StageOverride = as_made
    ) -> None:
        """Run a pass on its own results, with values at a rounding edge replaced; see `Runner.chained`."""
        self._adopting(case, this, observe, n_cached, override=override)

    def last_row(self, this: Pass, override: StageOverride = as_made) -> np.ndarray:
        """Compute the last row of logits as generation computes it; `this` is the case `near`."""
        return self._adopting("near", this, last_only=True, override=override)[-1]

    def free(self, this: Pass) -> np.ndarray:
        """Return the logits of a pass as users get it."""
        return _passes(self.weights, this, 0, lambda start, stop: lambda name, array: array)

    def text(self, prompt: Sequence[int], n_tokens: int) -> np.ndarray:
        """Generate the text as users get it."""
        model = Model(self.weights)
        vars(model)["tokenizer"] = IdsOnly()  # also a file without a vocabulary is judged
        return np.asarray([t.id for t in model.generate(prompt, max_tokens=n_tokens, ignore_eos=True)], np.int64)

    def _adopting(
        self, case: str, this: Pass, observe: StageObserver | None = None, n_cached: int = 0, *,
        last_only: bool = False, override: StageOverride = as_made,
    ) -> np.ndarray:  # fmt: skip
        """Run passes in which values at a rounding edge are replaced by the golden's, and show every stage."""

        def keeping(start: int, stop: int) -> Keep:
            def keep(name: str, array: np.ndarray) -> np.ndarray:
                made, flips, refused = self._adopted(case, name, array, stop)
                if observe is not None and start == n_cached:
                    observe(name, self._in_own_dtype(array), flips=flips, refused=refused)
                return override(name, made, start)

            return keep

        return _passes(self.weights, this, n_cached, keeping, last_only=last_only)

    def _in_own_dtype(self, array: np.ndarray) -> np.ndarray:
        """Convert an array of floats to the dtype of the run; integers stay."""
        return array.astype(self.weights.dtype) if array.dtype.kind == "f" else array

    def _adopted(self, case: str, name: str, array: np.ndarray, stop: int) -> tuple[np.ndarray, int, int]:
        """Replace each value that rounding may move to either side of an edge by the golden's value.

        Return the array, the number of replaced values, and the number of values that are too far off.
        """
        flips = refused = 0
        stage = self._stages[name]
        for kind in self._rounded.get(name, ()):
            first = stop - array.shape[token_axis(stage) or 0]  # behind the blocks: the last one
            parts = self._goldens[case][name], self._limits[case].chained_variance(name)
            expected, variance = (part_of(stage, part, first, stop) for part in parts)
            array, n, too_far = adopt_edges(array, expected.reshape(array.shape), kind, off(variance))
            flips, refused = flips + n, refused + too_far
        return array, flips, refused


def rounded_stages(weights: Weights) -> dict[str, set[ActivationKind]]:
    """Stage key to the types that it is rounded to before it is multiplied; a stage that nothing rounds is absent."""
    found: dict[str, set[ActivationKind]] = {}
    config = weights.config
    for _, stage, layer in keys(config):
        if stage.matrix:
            matrix = (weights if layer is None else weights.layer(layer))[matrix_of(stage, config)]
            matrix = matrix[0] if stage.by_expert else matrix
            kind = "F32" if isinstance(matrix, np.ndarray) else matrix.activations
            if kind != "F32":
                found.setdefault(input_keys(stage, layer, config)[0], set()).add(kind)
        elif stage.name in CACHE_ROUNDS and weights.cache_dtype is np.float16:
            found.setdefault(input_keys(stage, layer, config)[0], set()).add("F16")
    return found


def adopt_edges(
    ours: np.ndarray, golden: np.ndarray, kind: ActivationKind, allowed: np.ndarray
) -> tuple[np.ndarray, int, int]:
    """Take over the golden's values where the two sides round to different numbers, though they were equally good.

    `allowed` is the tolerance of each value. A block that holds a flip (for F16 and BF16 every such value) is replaced,
    unless one of its values is off by more. Returned are llorch's values after that, and how many values flipped in
    the blocks that were replaced, and in those that were not.
    """
    size = BLOCK_SIZE.get(kind, 1)
    theirs = golden.astype(ours.dtype)
    a, b = (round_activations(x, kind).reshape(-1, size) for x in (ours, theirs))
    flips = (~(np.abs(a - b) <= EDGE * np.abs(b).max(axis=-1, keepdims=True))).sum(axis=-1)
    if kind == "Q8_1":
        one, other = block_sums(ours).reshape(-1), block_sums(theirs).reshape(-1)
        flips += (np.abs(one - other) > EDGE * np.abs(other)) & (flips == 0)
    if not flips.any():
        return ours, 0, 0
    at_edge = (np.abs(ours - theirs) <= allowed).reshape(-1, size).all(axis=-1)
    mixed = np.where((at_edge & (flips > 0))[:, None], theirs.reshape(-1, size), ours.reshape(-1, size))
    return mixed.reshape(ours.shape), int(flips[at_edge].sum()), int(flips[~at_edge].sum())


def emulated(weights: Weights) -> str:
    """Name what is rounded in this file, `Q4_K, Q6_K: inputs rounded to Q8_K`; empty when nothing is."""
    types: dict[str, set[str]] = {}
    for name in weights:
        stored = weights.as_stored(name).ggml
        if len(weights.shape(name)) == 2 and ACTIVATION_TYPE[stored] != "F32":
            types.setdefault(ACTIVATION_TYPE[stored], set()).add(stored.name)
    parts = [f"{', '.join(sorted(stored))}: inputs rounded to {kind}" for kind, stored in sorted(types.items())]
    if weights.cache_dtype is np.float16:
        parts.append("cache F16: queries and probabilities rounded to F16")
    return "; ".join(parts)
