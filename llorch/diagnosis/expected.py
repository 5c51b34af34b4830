"""Tolerances of a right engine on the numbers of its dump, from `llorch.judging.tolerances.forward`.

The dump declares the engine's arithmetic, or else its numbers reveal it: if all values are bfloat16, the engine rounded
to bfloat16. Rounding errors of stages that the dump lacks propagate to the next dumped stage.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from llorch.diagnosis.replay import Arrays, Replay
from llorch.engines.dumps.stage_dump import INT8_CACHES, DumpedArray, StageDump
from llorch.judging.tolerances.forward import CACHES, SCORES, STATES, derive_tolerance, variances
from llorch.judging.tolerances.rounding import ARITHMETICS, CHAINED, ISOLATED, Arithmetic, Int8Cache
from llorch.ops.rounding import ActivationKind, round_activations
from llorch.stages.comparison import FLOOR, Tolerance
from llorch.stages.table import BY_NAME, Stage

HALF: Mapping[str, ActivationKind] = {"bfloat16": "BF16", "float16": "F16"}
FLASH = Arithmetic(2.0**-11, 2.0**-25)  # twice float16's unit: queries and sums are float16 for every cache dtype
RUN_BY_LLORCH = frozenset({"llorch", "llamacpp", "transformers"})  # in dumps of `trace` and `capture`
# Stages that many half-precision engines keep in float32; a float32 engine never rounds them.
FLOAT32_STAGES = frozenset({*SCORES, "router_probs", "delta_state"})
_MIN_VALUES = 16  # fewer distinct values do not identify a dtype
_FLOORS = Tolerance(FLOOR, FLOOR, FLOOR)


def infer_dtype(array: np.ndarray) -> str:
    """Infer the narrowest dtype that represents every value: bfloat16, float16 or else float32."""
    finite = array[np.isfinite(array)].astype(np.float32)
    if np.unique(np.abs(finite)).size < _MIN_VALUES:
        return "float32"
    with np.errstate(over="ignore"):
        lossless = (name for name, kind in HALF.items() if np.array_equal(round_activations(finite, kind), finite))
    return next(lossless, "float32")


@dataclass(frozen=True)
class StageMode:
    """Arithmetic that sets the tolerance of a stage."""

    arithmetic: Arithmetic
    name: str = ""  # shown in reports; empty for float32


class EngineArithmetic:
    """The arithmetic of the engine that wrote a dump."""

    def __init__(self, dump: StageDump) -> None:
        """Store the dump; dtypes are inferred from its numbers only when needed."""
        self._dump = dump
        self._dtype_at = lru_cache(maxsize=None)(self._infer_dtype)

    def mode_at(self, n_pass: int, name: str) -> StageMode:
        """Return the arithmetic that sets the tolerance of a stage of a pass."""
        features, stage = self._dump.features, name.rpartition(".")[2]
        dtype, reason = self._dtype
        # Embedding rows are copied weights, so their dtype does not reveal the dtype of the activations.
        inferred = (
            self._dtype_at(n_pass, name) if (n_pass, name) in self._dump.dumped and stage != "embed" else "float32"
        )
        stored_dtype = self._dump.dumped[n_pass, name].stored if (n_pass, name) in self._dump.dumped else ""
        if stage in FLOAT32_STAGES and (dtype in HALF or stored_dtype in HALF):
            dtype = inferred
        elif stage not in FLOAT32_STAGES and dtype == "float32":
            dtype, reason = inferred, "the type of its values"
        if stage in CACHES and features.kv_cache in INT8_CACHES:
            base = ARITHMETICS[dtype]
            group = features.kv_cache.removeprefix("int8-")
            return StageMode(
                Int8Cache(base.unit, base.smallest, base.activations, group),
                f"{features.kv_cache}, the declared type of the cache",
            )
        if self._is_flash_of_ggml and stage in (*CACHES, *SCORES, "attn_context"):
            return StageMode(FLASH, "attention in float16, like ggml's flash attention on a CPU")
        if stage in CACHES and features.kv_cache in HALF:
            dtype, reason = features.kv_cache, "the declared type of the cache"
        arithmetic, note = ARITHMETICS[dtype], f"{dtype}, {reason}" if dtype != "float32" else ""
        if features.activations:
            arithmetic = replace(arithmetic, activations=features.activations)
            note = f"{note + '; ' if note else ''}inputs of products in {features.activations}, as declared"
        if not note and features.kv_cache in (*HALF, *INT8_CACHES):  # float32 stages read the rounded cache too
            note = f"a cache in {features.kv_cache}, as declared"
        return StageMode(arithmetic, note)

    @property
    def may_add_in_one_lane(self) -> bool:
        """True unless the dump names an engine that llorch runs itself, whose sums it knows."""
        return self._dump.features.engine.lower() not in RUN_BY_LLORCH and not self._is_ggml

    @property
    def _is_flash_of_ggml(self) -> bool:
        return self._dump.features.flash_attention and self._is_ggml

    @property
    def _is_ggml(self) -> bool:
        name = self._dump.features.engine.lower()
        return any(word in name for word in ("llama.cpp", "llama-cpp", "ggml"))

    @property
    def _dtype(self) -> tuple[str, str]:
        """Dtype of most stages, declared or inferred from more than half of them, and how llorch knows it."""
        if self._dump.features.dtype in HALF:
            return self._dump.features.dtype, "as declared"
        if self._dump.features.dtype:
            return "float32", ""
        inferred = [
            self._dtype_at(n_pass, name)
            for n_pass, name in self._dump.dumped
            if name != "embed" and name.rpartition(".")[2] not in CACHES | FLOAT32_STAGES
        ]
        for dtype in HALF:
            if inferred and 2 * inferred.count(dtype) > len(inferred):
                return dtype, "the type of most values"
        return "float32", ""

    def _infer_dtype(self, n_pass: int, name: str) -> str:
        """Return a half dtype if the array is stored in it or has only values of it, else float32."""
        dumped = self._dump.dumped[n_pass, name]
        if BY_NAME[name.rpartition(".")[2]].is_selection:  # small integers fit every dtype
            return "float32"
        return dumped.stored if dumped.stored in HALF else infer_dtype(dumped.read())


@dataclass(frozen=True)
class Expected:
    """Tolerances of a stage: `local` for llorch's result on the engine's inputs, `total` for llorch's own run."""

    local: Tolerance
    total: Tolerance


class Expectations:
    """Tolerances of the stages of a pass, computed part by part (embedding, layers, logits) while the run advances."""

    def __init__(
        self,
        replay: Replay,
        n_pass: int,
        engine: EngineArithmetic,
        past: dict[str, np.ndarray],
        states: dict[str, np.ndarray],
    ) -> None:
        """Start the propagation; `past` (variances of caches and states) and `states` are updated for the next pass."""
        self._replay, self._n_pass, self._past, self._states = replay, n_pass, past, states
        self._arithmetic = lambda name: engine.mode_at(n_pass, name).arithmetic
        self._fed: dict[str, np.ndarray] = {}
        self._computed: dict[str, np.ndarray] = {}
        self._scores: dict[str, tuple[str, np.ndarray]] = {}  # selection -> stage of its scores, their variance
        self._steps = variances(
            replay.weights,
            replay.pass_ref(n_pass),
            self._fed,
            self._arithmetic,
            made=self._computed,
            hidden=_Hidden(replay, n_pass),
            stored=True,  # dumping may have rounded the engine's arrays
            past=dict(past),
            states=dict(states),
            one_lane=engine.may_add_in_one_lane,
        )

    def of_part(self, part: int, computed: Arrays, fed: Arrays) -> Iterator[tuple[str, Callable[..., Expected]]]:
        """Yield the stages of the part that just ran, each with a function from a dumped array to its tolerances.

        `computed` has llorch's arrays; `fed` has the arrays that later stages get, and the input of the part.
        """
        self._computed.update(computed)
        self._fed.update(fed)
        previous, spread = "", np.empty(0)  # previous stage and its variance; before a selection, its scores
        for name in (name for name in self._replay.stages if self._replay.part_of(name) == part):
            with np.errstate(all="ignore"):  # numbers that are not finite fail anyway
                key, variance = next(self._steps)
            assert key == name, (key, name)
            stage, _ = self._replay.stages[name]
            if stage.is_selection:
                self._scores[name] = previous, spread[ISOLATED] * (self._replay.fed(self._n_pass, previous) is None)
            previous, spread = name, variance
            self._keep_memory(name, stage, variance, fed)
            yield (
                name,
                lambda dumped, name=name, stage=stage, variance=variance: Expected(
                    _with_factor(
                        _tolerance(computed[name], variance[ISOLATED], stage, dumped),
                        self._arithmetic(name), computed[name], stage, dumped,
                    ),
                    _tolerance(computed[name], variance[CHAINED], stage, dumped),
                ),
            )  # fmt: skip
        next_input = self._replay.input_of(part + 1) if part < self._replay.config.n_layers else ""
        for arrays in (self._computed, self._fed):
            for name in [name for name in arrays if name != next_input]:
                del arrays[name]

    def _keep_memory(self, name: str, stage: Stage, variance: np.ndarray, fed: Arrays) -> None:
        """Store a state, and the variance of a cache or a state, for the next pass; it is 0 in a dumped array."""
        if stage.name in STATES.values():
            self._states[name] = fed[name]
        if stage.name in CACHES or stage.name in STATES.values():
            self._past[name] = variance.copy()
            if self._replay.fed(self._n_pass, name) is not None:
                self._past[name][ISOLATED] = 0

    def selection_scores(self, name: str, passed: Arrays) -> tuple[np.ndarray, np.ndarray] | None:
        """Return a selection's scores and their variances (0 if the dump has them); None for other stages."""
        if name not in self._scores:
            return None
        scores, variance = self._scores[name]
        return passed[scores], variance


class _Hidden:
    """Stages of a pass that llorch computes, because the dump lacks them or `Replay.fed` rejects them."""

    def __init__(self, replay: Replay, n_pass: int) -> None:
        self._replay, self._n_pass = replay, n_pass

    def __contains__(self, name: object) -> bool:
        return self._replay.fed(self._n_pass, str(name)) is None


def rows(array: np.ndarray, stage: Stage, dumped: DumpedArray) -> np.ndarray:
    """Select the tokens, keys and heads of a stage that the dump has."""
    return dumped.select(array, stage)


def _tolerance(computed: np.ndarray, variance: np.ndarray, stage: Stage, dumped: DumpedArray) -> Tolerance:
    part, spread = rows(computed, stage, dumped), rows(variance, stage, dumped)
    with np.errstate(all="ignore"):
        limit = derive_tolerance(part, spread, BY_NAME[stage.name])
    return Tolerance(limit.error, limit.worst, 0.0 if limit.tokens is None else limit.tokens).at_least(_FLOORS)


def _with_factor(
    tolerance: Tolerance, arithmetic: Arithmetic, computed: np.ndarray, stage: Stage, dumped: DumpedArray
) -> Tolerance:
    """Limit the common factor of an int8 cache: the tolerance of its large steps would hide a wrong scale."""
    if not isinstance(arithmetic, Int8Cache) or stage.name not in CACHES:
        return tolerance
    half_steps = rows(arithmetic.half_steps(computed), stage, dumped)
    return replace(tolerance, common_factor=arithmetic.largest_factor(half_steps, rows(computed, stage, dumped)))
