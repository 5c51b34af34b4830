"""llorch's forward pass on the engine's arrays, stage by stage.

Wherever the dump shows a stage for all tokens, the engine's array replaces llorch's as soon as llorch's was recorded.
Therefore every error shows in the stage that makes it. Between two stages of the dump llorch's pass runs through.
There a hypothesis can be *planted*: the result of a known mistake on the same inputs, another setting, a rounding.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np

from llorch.diagnosis.mistakes.stage_inputs import StageInputs, there
from llorch.engines.dumps.stage_dump import StageDump
from llorch.families.config import ModelConfig
from llorch.files import Weights
from llorch.model.blocks import parts_of
from llorch.model.cache import CacheRounding, DeltaState, KVCache
from llorch.model.forward import block
from llorch.ops.embedding import embedding
from llorch.ops.linear import linear
from llorch.ops.rms_norm import rms_norm
from llorch.ops.rope import rope_tables
from llorch.stages.stage_ref import Pass, Tokens
from llorch.stages.table import Stage, input_key, input_keys, key, keys, output_matrix

Arrays = Mapping[str, np.ndarray]
Places = Sequence[str]  # stage keys that ran since the dump showed the last ones
See = Callable[[str, np.ndarray], None]
EMBED = -1  # the part before the layers; the number of layers is the part behind them


@dataclass(frozen=True)
class LayerSetting:
    """Settings of a layer's run besides its input; a hypothesis may change them.

    Attributes:
        config: Configuration of the model.
        positions: Positions of the tokens of the pass.
        n_cached: Tokens of earlier passes.
        layer_weights: Gives the weights of a layer, or the weights outside the layers (None).
    """

    config: ModelConfig
    positions: np.ndarray
    n_cached: int
    layer_weights: Callable[[int | None], Mapping[str, Any]]

    @cached_property
    def rope_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines of the positions."""
        config = self.config
        return rope_tables(
            self.positions, head_dim=config.rotated, theta=config.rope_theta, scaling=config.rope_scaling
        )


@dataclass(frozen=True)
class StageChange:
    """Replacement of a stage."""

    wrong: Callable[[StageInputs, str, np.ndarray], np.ndarray]  # of the stage's inputs, its name and llorch's array
    reads: tuple[str, ...] = ()  # stages in addition to the inputs of the stage


@dataclass(frozen=True)
class Change:
    """Change that a hypothesis makes in a run.

    Attributes:
        plants: Replacements by stage key.
        passed_on: Stage key to a function of the array that later stages get, llorch's or the engine's.
        setting: Another setting.
    """

    plants: Mapping[str, StageChange] = field(default_factory=dict)
    passed_on: Mapping[str, Callable[[np.ndarray], np.ndarray]] = field(default_factory=dict)
    setting: Callable[[LayerSetting], LayerSetting] = lambda setting: setting


UNCHANGED = Change()


class Replay:
    """Ours beside one dump."""

    def __init__(self, weights: Weights, dump: StageDump) -> None:
        """Prepare; `weights` are in the dtype to compute in."""
        self.weights, self.config, self.dump = weights, weights.config, dump
        self.n_before = dump.n_before or 0  # tokens in the cache, of passes that the dump does not have
        self.stages = {name: (stage, layer) for name, stage, layer in keys(weights.config)}
        self.order = {name: at for at, name in enumerate(self.stages)}
        self.layer_weights = lru_cache(maxsize=2)(
            lambda layer: weights if layer is None else dict(weights.layer(layer))
        )
        self._read = lru_cache(maxsize=64)(self._read_fed)

    def tokens(self, n_pass: int) -> Tokens:
        """Return the tokens of a pass."""
        return self.dump.passes[n_pass]

    def this(self, n_pass: int) -> Pass:
        """Return a pass as the verifier describes it."""
        return Pass(self.tokens(n_pass).ids, self.tokens(n_pass).first_position)

    def n_cached(self, n_pass: int) -> int:
        """Count the tokens that earlier passes left in the cache."""
        return self.n_before + sum(len(tokens.ids) for tokens in self.dump.passes[:n_pass])

    def shape(self, n_pass: int, name: str) -> tuple[int, ...]:
        """Return the shape of a stage of a pass for all tokens of the pass."""
        seq = len(self.tokens(n_pass).ids)
        return self.stages[name][0].shape(self.config, seq=seq, ctx=self.n_cached(n_pass) + seq)

    def fed(self, n_pass: int, name: str) -> np.ndarray | None:
        """Return the engine's array if it replaces llorch's: it has all tokens, the right shape and possible values.

        Keys that a window's cache leaves out are NaN. None means that llorch's array stays.
        """
        return self._read(n_pass, name) if (n_pass, name) in self.dump.dumped else None

    def _read_fed(self, n_pass: int, name: str) -> np.ndarray | None:
        dumped = self.dump.dumped[n_pass, name]
        if dumped.tokens is not None and dumped.tokens != tuple(range(len(self.tokens(n_pass).ids))):
            return None
        array, left_out = dumped.read(), 0
        if dumped.keys is not None:
            left_out = self.shape(n_pass, name)[1] - dumped.keys
        if not self._can_be(self.stages[name][0], array).all():
            return None
        if left_out:
            array = np.pad(array, [(0, 0), (left_out, 0), (0, 0)], constant_values=np.nan)
        return array.astype(self._dtype(name)) if array.shape == self.shape(n_pass, name) else None

    def _can_be(self, stage: Stage, array: np.ndarray) -> np.ndarray:
        """Mark the values that are possible in a stage: numbers, masked entries, ids of existing experts."""
        if stage.is_choice and self.config.experts is not None:
            return (array >= 0) & (array < self.config.experts.n_experts)
        return np.isfinite(array) | (np.isneginf(array) if stage.masked else False)

    def _dtype(self, name: str) -> Any:
        return np.int64 if self.stages[name][0].is_choice else self.weights.dtype

    def part_of(self, name: str) -> int:
        """Return the part of the model that a stage is in: EMBED, a layer, or the number of layers."""
        stage, layer = self.stages[name]
        return layer if layer is not None else EMBED if stage.name == "embed" else self.config.n_layers

    def first_part(self, n_pass: int, part: int) -> int:
        """Return the part where a run must begin: the last one, at or before `part`, whose input the dump shows."""
        while part > EMBED and self.fed(n_pass, self.input_of(part)) is None:
            part -= 1
        return part

    def input_of(self, part: int) -> str:
        """Return the key of the stage that a part after EMBED reads."""
        return "embed" if part == 0 else key("block_out", part - 1)

    def ran_since(self, n_pass: int, name: str) -> tuple[str, ...]:
        """List the stages that ran since those that the dump shows, in order; `name` is the last."""
        found, pending = set[str](), [name]
        while pending:
            here = pending.pop()
            if here in found:
                continue
            found.add(here)
            stage, layer = self.stages[here]
            before = input_keys(stage, layer, self.config)
            pending += [each for each in before if self.fed(n_pass, each) is None]
        return tuple(sorted(found, key=self.order.__getitem__))

    def run(
        self,
        n_pass: int,
        observe: See,
        past: "Past",
        change: Change = UNCHANGED,
        *,
        first: int = EMBED,
        last: int | None = None,
        x: np.ndarray | None = None,
        fed: bool = True,
    ) -> Arrays:
        """Run the parts of the model from `first` to `last` (None: to the end); return what the last part passed on.

        `observe` is called with each stage that llorch computed, before the engine's array replaces it if `fed`. `past`
        are the caches before the pass; the run adds what they hold after it. `x` is the input of the first part; None
        for the engine's array, which the dump then shows.
        """
        right = LayerSetting(self.config, self.this(n_pass).positions, self.n_cached(n_pass), self.layer_weights)
        setting = change.setting(right)
        if x is None and first > EMBED:
            x = self.fed(n_pass, self.input_of(first))
            assert x is not None, self.input_of(first)
        passed: Arrays = {} if x is None else {self.input_of(first): x}
        for part in range(first, (self.config.n_layers if last is None else last) + 1):
            passed = self._run_part(n_pass, part, passed, observe, past, change, setting, fed=fed)
        return passed

    def _run_part(
        self, n_pass: int, part: int, before: Arrays, observe: See, past: "Past", change: Change,
        setting: LayerSetting, *, fed: bool,
    ) -> Arrays:  # fmt: skip
        """Run one part of the model on what the part before it passed on."""
        config, w = setting.config, setting.layer_weights(part if 0 <= part < self.config.n_layers else None)
        passed = {self.input_of(part): before[self.input_of(part)]} if part > EMBED else {}

        def keep(name: str, array: np.ndarray, layer: int | None = None) -> np.ndarray:
            place = key(name, layer)
            if (stage_change := change.plants.get(place)) is not None:
                inputs = self._inputs(n_pass, place, setting, passed, past, stage_change.reads)
                array = np.ascontiguousarray(stage_change.wrong(inputs, name, array), dtype=self._dtype(place))
            observe(place, array)
            theirs = self.fed(n_pass, place) if fed else None
            array = array if theirs is None else self._with_left_out(n_pass, place, theirs, array)
            passed[place] = change.passed_on[place](array) if place in change.passed_on else array
            return passed[place]

        if part == EMBED:
            keep("embed", embedding(np.asarray(self.tokens(n_pass).ids), w["embed_tokens"]))
        elif part < self.config.n_layers:
            x, tables = passed[self.input_of(part)], setting.rope_tables
            parts = parts_of(config, part, setting.positions)
            block(x, w, config, *tables, past.memory(part), partial(keep, layer=part), **parts)
            past.note(part, passed)
        else:
            x = keep("final_norm", rms_norm(passed[self.input_of(part)], w["final_norm"], eps=config.rms_norm_eps))
            keep("logits", linear(x, w[output_matrix(config)]))
        return passed

    def _with_left_out(self, n_pass: int, name: str, theirs: np.ndarray, ours: np.ndarray) -> np.ndarray:
        """Fill the keys that the engine left out with llorch's."""
        if self.dump.dumped[n_pass, name].keys is None or theirs.shape != ours.shape:
            return theirs
        return np.where(np.isnan(theirs), ours, theirs)

    def _inputs(
        self, n_pass: int, place: str, setting: LayerSetting, passed: Arrays, past: "Past", reads: tuple[str, ...]
    ) -> StageInputs:
        """Collect the inputs of a stage for a mistake: arrays that were passed on, caches, weights and positions."""
        stage, layer = self.stages[place]
        names = (*stage.input_names(self.config, layer), *there(reads, self.config, layer))
        arrays = {name: passed[input_key(name, layer, self.config)] for name in names}
        if layer is not None:
            arrays |= past.before(layer)
        ids, weights = np.asarray(self.tokens(n_pass).ids), setting.layer_weights(layer)
        return StageInputs(setting.config, weights, arrays, ids, setting.positions, self.weights.dtype, layer)


class Past:
    """Caches and states of all layers before a pass and after it.

    A dump may show the cache that attention got although the engine keeps another one. Then `as_given` is False, and
    the kept cache consists of the appended rows.
    """

    def __init__(
        self, config: ModelConfig, dtype: type[np.floating], *,
        held: dict[int, tuple[np.ndarray, np.ndarray]] | None = None, as_given: bool = True,
        rounding: CacheRounding = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Create the caches before the first pass; `held` are keys and values of earlier tokens by layer, if any.

        They hold what attention got if `as_given`, else the appended rows. For `rounding` see `KVCache`.
        """
        self._rounding = rounding
        if held is None:
            empty = np.empty((config.n_kv_heads, 0, config.head_dim), dtype)
            held = dict.fromkeys(range(config.n_layers), (empty, empty))
        self._of_one_layer = replace(config, n_layers=1, layers=())
        self.as_given, self._first, self._before = as_given, held, held
        self._states = {
            i: DeltaState.empty(config.delta_net, dtype)
            for i in range(config.n_layers)
            if config.delta_net is not None and config.layer(i).mixer == "delta_net"
        }
        self._after: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._states_after: dict[int, DeltaState] = {}

    def before(self, layer: int) -> dict[str, np.ndarray]:
        """Return keys and values before this pass, (kv_heads, tokens, head_dim), and the state of a delta net."""
        k, v = self._before[layer]
        if layer not in self._states:
            return {"past_k": k, "past_v": v}
        state = self._states[layer]
        return {"past_k": k, "past_v": v, "past_conv": state.conv, "past_delta": state.delta}

    def memory(self, layer: int) -> Any:
        """Return the cache or the state that a layer of this pass reads and writes, see `KVCache.memory`."""
        if layer not in self._states:
            return partial(self.append, layer)
        self._states_after[layer] = replace(self._states[layer])
        return self._states_after[layer]

    def append(self, layer: int, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and values of the whole context, with the new rows (seq, kv_heads, head_dim)."""
        rounding = {0: self._rounding[layer]} if layer in self._rounding else {}
        cache = KVCache(self._of_one_layer, self._before[layer][0].dtype.type, rounding=rounding)  # as for users
        if n_before := self._before[layer][0].shape[1]:
            cache.append(0, *(old.swapaxes(0, 1) for old in self._before[layer]))
            cache.advance(n_before)
        self._after[layer] = cache.append(0, k, v)
        return self._after[layer]

    def note(self, layer: int, passed: Arrays) -> None:
        """Keep the keys and values of the whole context, as attention got them in a layer, for the next pass.

        Layers without such a cache are left out, and all layers if the engine's own caches are not taken `as_given`.
        """
        if self.as_given and layer not in self._states:
            self._after[layer] = passed[key("k_cache", layer)], passed[key("v_cache", layer)]

    def next(self) -> "Past":
        """Return the caches before the next pass."""
        return self._with(self._before | self._after, self._states | self._states_after)

    def again(self) -> "Past":
        """Return the caches before the same pass."""
        return self._with(self._before, self._states)

    def empty(self) -> "Past":
        """Return the caches before the first pass."""
        return self._with(
            self._first, {i: DeltaState(np.zeros_like(s.conv), np.zeros_like(s.delta)) for i, s in self._states.items()}
        )

    def _with(self, before: dict[int, tuple[np.ndarray, np.ndarray]], states: dict[int, DeltaState]) -> "Past":
        made = copy(self)
        made._before, made._after, made._states, made._states_after = before, {}, states, {}
        return made
