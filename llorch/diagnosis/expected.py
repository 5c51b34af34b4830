"""Tolerances of a right engine on the numbers of its dump, from the tolerances of the verifier.

An engine's arithmetic is the declared one. Without a declaration the numbers show it: if all values are bfloat16, the
engine rounded to bfloat16. Stages that the dump hides pass their rounding on to the next one that it shows.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from llorch.diagnosis.replay import Arrays, Replay
from llorch.engines.dumps.stage_dump import DumpedArray, StageDump
from llorch.judging.tolerances.forward import CACHES, SCORES, STATES, derive_tolerance, variances
from llorch.judging.tolerances.rounding import ARITHMETICS, CHAINED, ISOLATED, Arithmetic
from llorch.ops.rounding import ActivationKind, round_activations
from llorch.stages.comparison import FLOOR, Tolerance
from llorch.stages.stage_ref import token_axis
from llorch.stages.table import BY_NAME, Stage

HALF: Mapping[str, ActivationKind] = {"bfloat16": "BF16", "float16": "F16"}
FLASH = Arithmetic(2.0**-11, 2.0**-25)  # twice a rounding: queries and sums are float16 too, whatever the cache is
# float32 in many narrower engines, never below in float32 ones
KEPT = frozenset({*SCORES, "router_probs", "delta_state"})
_MIN_VALUES = 16  # fewer different ones say nothing of a dtype
_TOLERANCES = Tolerance(FLOOR, FLOOR, FLOOR)


def dtype_shown(array: np.ndarray) -> str:
    """Infer the narrowest dtype that holds every value: bfloat16 or float16, float32 for all others."""
    finite = array[np.isfinite(array)].astype(np.float32)
    if np.unique(np.abs(finite)).size < _MIN_VALUES:
        return "float32"
    with np.errstate(over="ignore"):
        fits = (name for name, kind in HALF.items() if np.array_equal(round_activations(finite, kind), finite))
    return next(fits, "float32")


@dataclass(frozen=True)
class StageMode:
    """Arithmetic in which a stage is judged."""

    arithmetic: Arithmetic
    name: str = ""  # for a person; empty for plain float32


class EngineArithmetic:
    """The arithmetic of the engine that wrote a dump."""

    def __init__(self, dump: StageDump) -> None:
        """Look at what it declares; its numbers are looked at when they are asked for."""
        self._dump = dump
        self._shown = lru_cache(maxsize=None)(self._dtype_of)

    def mode_at(self, n_pass: int, name: str) -> StageMode:
        """Return the arithmetic in which a stage of a pass is judged."""
        features, stage = self._dump.features, name.rpartition(".")[2]
        dtype, how = self._dtype
        own = self._shown(n_pass, name) if (n_pass, name) in self._dump.dumped and stage != "embed" else "float32"
        stored = self._dump.dumped[n_pass, name].stored if (n_pass, name) in self._dump.dumped else ""
        if stage in KEPT and (dtype in HALF or stored in HALF):
            dtype = own
        elif stage not in KEPT and dtype == "float32":
            dtype, how = own, "the type of its values"
        if self._is_flash_of_ggml and stage in (*CACHES, *SCORES, "attn_context"):
            return StageMode(FLASH, "attention in float16, like ggml's flash attention on a CPU")
        if stage in CACHES and features.kv_cache in HALF:
            dtype, how = features.kv_cache, "the declared type of the cache"
        made, said = ARITHMETICS[dtype], f"{dtype}, {how}" if dtype != "float32" else ""
        if features.activations:
            made = replace(made, activations=features.activations)
            said = f"{said + '; ' if said else ''}inputs of products in {features.activations}, as declared"
        if not said and features.kv_cache in HALF:
            said = f"a cache in {features.kv_cache}, as declared"
        return StageMode(made, said)

    @property
    def _is_flash_of_ggml(self) -> bool:
        said = self._dump.features.engine.lower()
        return self._dump.features.flash_attention and any(name in said for name in ("llama.cpp", "llama-cpp", "ggml"))

    @property
    def _dtype(self) -> tuple[str, str]:
        """Dtype of the engine as a whole: declared, or shown by half of its stages."""
        if self._dump.features.dtype in HALF:
            return self._dump.features.dtype, "as declared"
        if self._dump.features.dtype:
            return "float32", ""
        shown = [
            self._shown(n_pass, name)
            for n_pass, name in self._dump.dumped
            if name != "embed" and name.rpartition(".")[2] not in CACHES | KEPT
        ]
        for dtype in HALF:
            if shown and 2 * shown.count(dtype) > len(shown):
                return dtype, "the type of most values"
        return "float32", ""

    def _dtype_of(self, n_pass: int, name: str) -> str:
        """Return the dtype of an array: a half type if stored so or if all values fit it, else float32."""
        dumped = self._dump.dumped[n_pass, name]
        if BY_NAME[name.rpartition(".")[2]].is_choice:  # small integers fit into everything
            return "float32"
        return dumped.stored if dumped.stored in HALF else dtype_shown(dumped.read())


@dataclass(frozen=True)
class Expected:
    """Tolerances of a stage: given the engine's inputs, and in a whole run."""

    local: Tolerance
    total: Tolerance


class Expectations:
    """Limits of a pass, part by part: a part is judged when it ran."""

    def __init__(
        self,
        replay: Replay,
        n_pass: int,
        engine: EngineArithmetic,
        past: dict[str, np.ndarray],
        states: dict[str, np.ndarray],
    ) -> None:
        """Prepare; `past` holds the variances of caches and states, `states` the states: filled with those after it."""
        self._replay, self._n_pass, self._past, self._states = replay, n_pass, past, states
        self._fed: dict[str, np.ndarray] = {}
        self._made: dict[str, np.ndarray] = {}
        self._scores: dict[str, tuple[str, np.ndarray]] = {}  # by a choice: what it is made by, and the variance of it
        self._steps = variances(
            replay.weights,
            replay.this(n_pass),
            self._fed,
            lambda name: engine.mode_at(n_pass, name).arithmetic,
            made=self._made,
            hidden=_Hidden(replay, n_pass),
            stored=True,
            past=dict(past),
            states=dict(states),
        )

    def of_part(self, part: int, made: Arrays, fed: Arrays) -> Iterator[tuple[str, Callable[..., Expected]]]:
        """Yield the stages of a part of the model that just ran, each with a function that gives its tolerances.

        `made` are the arrays that llorch computed, `fed` those that were passed on, the input of the part among them.
        """
        self._made.update(made)
        self._fed.update(fed)
        before, spread = "", np.empty(0)  # of the stage before, by which a choice is made
        for name in (name for name in self._replay.stages if self._replay.part_of(name) == part):
            with np.errstate(all="ignore"):  # what is not finite fails as such
                key, variance = next(self._steps)
            assert key == name, (key, name)
            stage, _ = self._replay.stages[name]
            if stage.is_choice:
                self._scores[name] = before, spread[ISOLATED] * (self._replay.fed(self._n_pass, before) is None)
            before, spread = name, variance
            self._keep_memory(name, stage, variance, fed)
            yield (
                name,
                lambda seen, name=name, stage=stage, variance=variance: Expected(
                    *(_limit(made[name], variance[run], stage, seen) for run in (ISOLATED, CHAINED))
                ),
            )
        last = self._replay.input_of(part + 1) if part < self._replay.config.n_layers else ""
        for arrays in (self._made, self._fed):
            for name in [name for name in arrays if name != last]:
                del arrays[name]

    def _keep_memory(self, name: str, stage: Stage, variance: np.ndarray, fed: Arrays) -> None:
        """Keep a state, and the variance of a cache or a state, for the next pass."""
        if stage.name in STATES.values():
            self._states[name] = fed[name]
        if stage.name in CACHES or stage.name in STATES.values():
            self._past[name] = variance.copy()
            if self._replay.fed(self._n_pass, name) is not None:
                self._past[name][ISOLATED] = 0

    def chosen_by(self, name: str, passed: Arrays) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the scores behind a choice, and their variances: 0 if the dump shows the scores; None if no choice."""
        if name not in self._scores:
            return None
        scores, variance = self._scores[name]
        return passed[scores], variance


class _Hidden:
    """The stages of a pass that the dump does not show."""

    def __init__(self, replay: Replay, n_pass: int) -> None:
        self._replay, self._n_pass = replay, n_pass

    def __contains__(self, name: object) -> bool:
        return self._replay.fed(self._n_pass, str(name)) is None


def rows(array: np.ndarray, stage: Stage, dumped: DumpedArray) -> np.ndarray:
    """Select the tokens and keys of a stage that the dump shows."""
    if dumped.keys is not None:
        return array[:, -dumped.keys :]
    axis = token_axis(stage)
    return array if dumped.tokens is None or axis is None else np.take(array, dumped.tokens, axis=axis)


def _limit(made: np.ndarray, variance: np.ndarray, stage: Stage, dumped: DumpedArray) -> Tolerance:
    part, spread = rows(made, stage, dumped), rows(variance, stage, dumped)
    with np.errstate(all="ignore"):
        found = derive_tolerance(part, spread, BY_NAME[stage.name])
    return Tolerance(found.error, found.worst, 0.0 if found.tokens is None else found.tokens).at_least(_TOLERANCES)
