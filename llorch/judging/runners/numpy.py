"""Runners of the NumPy forward pass: with exact numerics, and under ggml numerics against llama.cpp on the same file.

A runner records every stage: `isolated`, reading the golden's inputs, or `chained`, reading the results of earlier
stages. Under ggml numerics llorch rounds the inputs of every product to a few bits, as llama.cpp does. If a value is at
the edge between two codes, a difference in the seventh digit flips it: the two round it to different codes. The sum
then differs by a whole code, and all later stages by a quantisation error. In chained passes, flipped values are
counted and replaced by the golden's, so that chained tolerances stay as tight as isolated ones. A value is at an edge
only if it is within its tolerance *before* it is rounded. Other flipped values are not replaced, and fail their
comparison.

Source: llama.cpp ggml/src/ggml-cpu; llorch.ops.rounding.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import pairwise

import numpy as np

from llorch.files import Weights
from llorch.files.quant import ACTIVATION_TYPE
from llorch.judging.expert_selection import StageOverride, identity
from llorch.judging.goldens.forward import SAMPLINGS
from llorch.judging.runners import StageObserver, Trace
from llorch.judging.tolerances.forward import ForwardTolerances, largest_errors
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

OWN_SUMS = "numpy-float32"  # every sum in float32, as in larger models, see `ops.precision`
FLOAT64 = "numpy-float64"  # the same code in float64, compared only with the float64 reference
BACKENDS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {  # float32 backends
    "numpy": nullcontext,  # default: short sums in float64
    OWN_SUMS: own_dtype_only,
}
GGML = "numpy-ggml"
BY_KERNELS = "numpy-ggml-kernels"  # ggml's own functions multiply
EDGE = 2.0**-13  # a flip is larger: a quarter of the smallest step of any rounding, over the block's largest value

CACHE_ROUNDS = frozenset({"k_cache", "v_cache", "attn_scores", "attn_context"})  # a float16 cache rounds their input 0


def run(weights: Weights, inputs: Pass, *, n_cached: int = 0, golden: Trace | None = None) -> dict[str, np.ndarray]:
    """Trace llorch's forward pass by stage key; with `n_cached`, trace only the pass after so many prefilled tokens.

    A `golden` trace replaces each stage as soon as it is recorded, so that every stage is isolated.
    """
    trace: dict[str, np.ndarray] = {}
    show(weights, inputs, trace.__setitem__, n_cached=n_cached, golden=golden)
    return trace


def show(
    weights: Weights,
    inputs: Pass,
    observe: Callable[[str, np.ndarray], None],
    *,
    n_cached: int = 0,
    golden: Trace | None = None,
    override: StageOverride = identity,
    after_failure: bool = False,
) -> None:
    """Pass the trace of `run` to `observe` stage by stage; `override` replaces stages that have no golden.

    With `after_failure`, a pass with other tokens starts and is aborted between prefill and decode, as an interrupt may
    do; the cache must not change.
    """
    goldens = _goldens_by_stage(golden or {}, weights, inputs)

    def keep_for(start: int, stop: int) -> Keep:
        def keep(name: str, array: np.ndarray) -> np.ndarray:
            if start == n_cached:
                observe(name, array)
            if name not in goldens:
                return override(name, array, start)
            stage, golden_stage = goldens[name]
            if stop < len(inputs.ids) and not has_tokens(stage):
                return array  # the golden has this state only after all tokens
            return part_of(stage, golden_stage, start, stop).astype(array.dtype)

        return keep

    _run_passes(weights, inputs, n_cached, keep_for, after_failure=after_failure)


def _goldens_by_stage(golden: Trace, weights: Weights, inputs: Pass) -> dict:
    """Map stage keys to (stage, golden) for goldens of the correct shape; a wrong shape fails in its comparison."""
    n_tokens = len(inputs.ids)
    return {
        name: (stage, golden[name])
        for name, stage, _ in keys(weights.config)
        if name in golden and golden[name].shape == stage.shape(weights.config, seq=n_tokens, ctx=n_tokens)
    }


def _run_passes(
    weights: Weights, inputs: Pass, n_cached: int, keep_for: Callable[[int, int], Keep], *, last_only: bool = False,
    after_failure: bool = False,
) -> np.ndarray:  # fmt: skip
    """Run one pass, or prefill and decode if `n_cached` > 0; return the logits of the last pass."""
    cache = KVCache.of(weights, first_position=inputs.first_position)
    ids, bounds = np.asarray(inputs.ids), [0, *([n_cached] if n_cached else []), len(inputs.ids)]
    logits = np.empty(0)
    for start, stop in pairwise(bounds):
        if start and after_failure:
            _abort_pass(ids[start:stop][::-1], weights, cache)
        logits = forward(ids[start:stop], weights, cache, keep=keep_for(start, stop), last_only=last_only)
    return logits


class _PassFailedError(Exception):
    """Raised to abort a pass in the middle, like an interrupt."""


def _abort_pass(ids: np.ndarray, weights: Weights, cache: KVCache) -> None:
    """Start a pass, and abort it after the first layer with a recurrent state, else after layer 0."""
    layers = range(weights.config.n_layers)
    last_stage = key("block_out", next((i for i in layers if weights.config.layer(i).mixer == "delta_net"), 0))

    def keep(name: str, array: np.ndarray) -> np.ndarray:
        if name == last_stage:
            raise _PassFailedError
        return array

    with suppress(_PassFailedError):
        forward(ids, weights, cache, keep=keep)


class NumpyRunner:
    """llorch's NumPy forward pass with exact numerics."""

    hidden: frozenset[str] = frozenset()

    def __init__(self, weights: Weights, name: str = "numpy") -> None:
        """Prepare a runner of float32 weights; `name` is `numpy`, `OWN_SUMS` or `FLOAT64`, which converts them."""
        self.name = name
        self.dtype: DtypeName = "float64" if name == FLOAT64 else "float32"
        self.weights = weights
        if name == FLOAT64:
            n_bytes = 8 * sum(math.prod(weights.shape(weight)) for weight in weights)
            self.weights = weights.astype(np.float64, keep=n_bytes < available_memory() / 2)  # else convert at each use

    def arithmetic(self) -> AbstractContextManager[None]:
        """Return the context of the backend: sums in float32 for `OWN_SUMS`."""
        return BACKENDS.get(self.name, nullcontext)()

    def isolated(self, inputs: Pass, golden: Trace, observe: StageObserver) -> None:
        """Run a pass in which the golden replaces each stage as soon as `observe` has received it."""
        show(self.weights, inputs, observe, golden=golden)

    def chained(
        self, case: str, inputs: Pass, observe: StageObserver, *, n_cached: int = 0, override: StageOverride = identity
    ) -> None:
        """Run a pass, or the pass after `n_cached` prefilled tokens and an aborted pass; see `Runner.chained`."""
        show(self.weights, inputs, observe, n_cached=n_cached, override=override, after_failure=True)

    def in_chunks(self, inputs: Pass, bounds: Sequence[int], observe: Callable[[str, np.ndarray, int], None]) -> None:
        """Run the tokens from each bound to the next as one chunk; observe each stage and the end of its chunk."""
        cache = KVCache.of(self.weights, first_position=inputs.first_position)
        for start, stop in pairwise(bounds):

            def keep(name: str, array: np.ndarray, stop: int = stop) -> np.ndarray:
                observe(name, array, stop)
                return array

            forward(np.asarray(inputs.ids[start:stop]), self.weights, cache, keep=keep)

    def last_row(self, inputs: Pass, override: StageOverride = identity) -> np.ndarray:
        """Compute the logits of the last token as generation does."""
        keep = lambda name, array: override(name, array, 0)  # noqa: E731
        return forward(np.asarray(inputs.ids), self.weights, KVCache.of(self.weights), keep=keep, last_only=True)[0]

    def probabilities(self, logits: np.ndarray, history: Sequence[int]) -> Mapping[str, np.ndarray]:
        """Compute the distributions with llorch's sampler."""
        rows = logits.astype(self.weights.dtype)
        return {name: probabilities(rows, settings, history) for name, settings in SAMPLINGS.items()}

    def text(self, prompt: Sequence[int], n_tokens: int) -> np.ndarray:
        """Generate the text with llorch's decode loop."""
        sampled = sample_ids(self._step(KVCache.of(self.weights)), prompt, SamplingSettings(), max_tokens=n_tokens)
        return np.asarray([token for token, _ in sampled], np.int64)

    def _step(self, cache: KVCache) -> Callable[[Sequence[int]], np.ndarray]:
        """Return a function that runs new tokens and returns the logits of the last token."""
        return lambda new: forward(np.asarray(new), self.weights, cache, last_only=True)[0]


def numpy_runners(weights: Weights, *, has_reference: bool) -> Iterator[NumpyRunner]:
    """Yield a runner for each NumPy backend, in float64 only if there is a float64 reference to compare with."""
    yield from (NumpyRunner(weights, name) for name in (*BACKENDS, *([FLOAT64] if has_reference else [])))


class GgmlRunner(NumpyRunner):
    """llorch's NumPy forward pass under ggml numerics, with llama.cpp's values at rounding edges."""

    def __init__(
        self,
        weights: Weights,
        goldens: Mapping[str, Trace],
        tolerances: Mapping[str, ForwardTolerances],
        name: str | None = None,
    ) -> None:
        """Prepare a runner of weights with their numerics; llama.cpp's traces and their tolerances are by case."""
        super().__init__(weights, name or (BY_KERNELS if weights.numerics.kernels == "ggml" else GGML))
        self._goldens, self._tolerances = goldens, tolerances
        self._rounded = rounded_stages(weights)
        self._stages = {name: stage for name, stage, _ in keys(weights.config)}

    def isolated(self, inputs: Pass, golden: Trace, observe: StageObserver) -> None:
        """Run a pass like `NumpyRunner.isolated`, but observe a float16 cache as float32, the golden's dtype."""
        show(self.weights, inputs, lambda name, array: observe(name, self._in_own_dtype(array)), golden=golden)

    def chained(
        self, case: str, inputs: Pass, observe: StageObserver, *, n_cached: int = 0, override: StageOverride = identity
    ) -> None:
        """Run a chained pass in which the golden's values replace flips; see `Runner.chained`."""
        self._run_replacing_flips(case, inputs, observe, n_cached, override=override)

    def last_row(self, inputs: Pass, override: StageOverride = identity) -> np.ndarray:
        """Compute the logits of the last token as generation does; `inputs` must be the case `near`, at position 0."""
        return self._run_replacing_flips("near", inputs, last_only=True, override=override)[-1]

    def free(self, inputs: Pass) -> np.ndarray:
        """Return the logits of a pass as users run it, without replacing flips."""
        return _run_passes(self.weights, inputs, 0, lambda start, stop: lambda name, array: array)

    def text(self, prompt: Sequence[int], n_tokens: int) -> np.ndarray:
        """Generate the text as users do, without replacing flips."""
        model = Model(self.weights)
        vars(model)["tokenizer"] = IdsOnly()  # so that files without a vocabulary work
        return np.asarray([t.id for t in model.generate(prompt, max_tokens=n_tokens, ignore_eos=True)], np.int64)

    def _run_replacing_flips(
        self, case: str, inputs: Pass, observe: StageObserver | None = None, n_cached: int = 0, *,
        last_only: bool = False, override: StageOverride = identity,
    ) -> np.ndarray:  # fmt: skip
        """Run passes that replace flips by the golden's values; observe the last pass and return its logits."""

        def keep_for(start: int, stop: int) -> Keep:
            def keep(name: str, array: np.ndarray) -> np.ndarray:
                replaced, flips, refused = self._replace_flips(case, name, array, stop)
                if observe is not None and start == n_cached:
                    observe(name, self._in_own_dtype(array), flips=flips, refused=refused)
                return override(name, replaced, start)

            return keep

        return _run_passes(self.weights, inputs, n_cached, keep_for, last_only=last_only)

    def _in_own_dtype(self, array: np.ndarray) -> np.ndarray:
        """Convert an array of floats to the dtype of the run; leave integers unchanged."""
        return array.astype(self.weights.dtype) if array.dtype.kind == "f" else array

    def _replace_flips(self, case: str, name: str, array: np.ndarray, stop: int) -> tuple[np.ndarray, int, int]:
        """Replace flips of a stage by the golden's values, for each type to which products round the stage.

        Return the array, the number of replaced flips, and the number of flips whose error exceeds the tolerance.
        """
        flips = refused = 0
        stage = self._stages[name]
        for kind in self._rounded.get(name, ()):
            first = stop - array.shape[token_axis(stage) or 0]  # with `last_only`, only the last token
            arrays = self._goldens[case][name], self._tolerances[case].chained_variance(name)
            expected, variance = (part_of(stage, array, first, stop) for array in arrays)
            array, n, n_refused = replace_flips(array, expected.reshape(array.shape), kind, largest_errors(variance))
            flips, refused = flips + n, refused + n_refused
        return array, flips, refused


def rounded_stages(weights: Weights) -> dict[str, set[ActivationKind]]:
    """Map the key of each stage that is an input of products to the types to which they round it."""
    rounded: dict[str, set[ActivationKind]] = {}
    config = weights.config
    for _, stage, layer in keys(config):
        if stage.matrix:
            matrix = (weights if layer is None else weights.layer(layer))[matrix_of(stage, config)]
            matrix = matrix[0] if stage.by_expert else matrix
            kind = "F32" if isinstance(matrix, np.ndarray) else matrix.activations
            if kind != "F32":
                rounded.setdefault(input_keys(stage, layer, config)[0], set()).add(kind)
        elif stage.name in CACHE_ROUNDS and weights.cache_dtype is np.float16:
            rounded.setdefault(input_keys(stage, layer, config)[0], set()).add("F16")
    return rounded


def replace_flips(
    actual: np.ndarray, golden: np.ndarray, kind: ActivationKind, tolerance: np.ndarray
) -> tuple[np.ndarray, int, int]:
    """Replace values by the golden's if llorch and the engine round them to different numbers.

    A block with a flip (for F16 and BF16, a single value) is replaced if the errors of all its values are within the
    `tolerance` of each value: it is at a rounding edge. Return llorch's values after the replacement, the number of
    flips in replaced blocks, and the number of flips in other blocks.
    """
    size = BLOCK_SIZE.get(kind, 1)
    expected = golden.astype(actual.dtype)
    rounded, expected_rounded = (round_activations(array, kind).reshape(-1, size) for array in (actual, expected))
    flips = (~(np.abs(rounded - expected_rounded) <= EDGE * np.abs(expected_rounded).max(axis=-1, keepdims=True))).sum(
        axis=-1
    )
    if kind == "Q8_1":
        sums, expected_sums = block_sums(actual).reshape(-1), block_sums(expected).reshape(-1)
        flips += (np.abs(sums - expected_sums) > EDGE * np.abs(expected_sums)) & (flips == 0)
    if not flips.any():
        return actual, 0, 0
    at_edge = (np.abs(actual - expected) <= tolerance).reshape(-1, size).all(axis=-1)
    mixed = np.where((at_edge & (flips > 0))[:, None], expected.reshape(-1, size), actual.reshape(-1, size))
    return mixed.reshape(actual.shape), int(flips[at_edge].sum()), int(flips[~at_edge].sum())


def describe_rounding(weights: Weights) -> str:
    """Describe how a file's products round their inputs, like `Q4_K, Q6_K: inputs rounded to Q8_K`; empty if none."""
    types: dict[str, set[str]] = {}
    for name in weights:
        stored_type = weights.as_stored(name).ggml
        if len(weights.shape(name)) == 2 and ACTIVATION_TYPE[stored_type] != "F32":
            types.setdefault(ACTIVATION_TYPE[stored_type], set()).add(stored_type.name)
    parts = [f"{', '.join(sorted(names))}: inputs rounded to {kind}" for kind, names in sorted(types.items())]
    if weights.cache_dtype is np.float16:
        parts.append("cache F16: queries and probabilities rounded to F16")
    return "; ".join(parts)
