"""llorch's forward pass on the engine's arrays, stage by stage.

If the dump has a stage for all tokens, the engine's array replaces llorch's after llorch's was recorded. So an error
shows only in the stage where it starts. llorch computes the stages that the dump lacks. A hypothesis can be *injected*
at any stage: the output of a known mistake on the same inputs, another setting, or a rounding. A *stage key* names a
stage of a layer (`l0.q_rope`) or outside the layers (`logits`).
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np

from llorch.diagnosis.mistakes.stage_inputs import StageInputs, existing_stages
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
StageKeys = Sequence[str]
StageObserver = Callable[[str, np.ndarray], None]
EMBED = -1  # part of the model before layer 0; part n_layers is the final norm and the logits


@dataclass(frozen=True)
class LayerSetting:
    """Settings of a layer's run that a hypothesis may change; the input is not among them."""

    config: ModelConfig
    positions: np.ndarray  # of the pass's tokens
    n_cached: int  # number of tokens of earlier passes
    layer_weights: Callable[[int | None], Mapping[str, Any]]  # layer to its weights; None to those outside the layers

    @cached_property
    def rope_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines of the positions."""
        config = self.config
        return rope_tables(
            self.positions, head_dim=config.rotated, theta=config.rope_theta, scaling=config.rope_scaling
        )


@dataclass(frozen=True)
class StageChange:
    """Replacement of a stage's array."""

    wrong: Callable[[StageInputs, str, np.ndarray], np.ndarray]  # called with inputs, stage name and llorch's array
    reads: tuple[str, ...] = ()  # stages that it reads in addition to the stage's inputs


@dataclass(frozen=True)
class Change:
    """Change that a hypothesis makes in a run: of computed stages, of the arrays passed on, and of settings."""

    replaced_stages: Mapping[str, StageChange] = field(default_factory=dict)  # by stage key
    # By stage key: function of the array that later stages get, llorch's or the engine's.
    passed_on: Mapping[str, Callable[[np.ndarray], np.ndarray]] = field(default_factory=dict)
    setting: Callable[[LayerSetting], LayerSetting] = lambda setting: setting


UNCHANGED = Change()


class Replay:
    """llorch's forward pass on the arrays of one dump."""

    def __init__(self, weights: Weights, dump: StageDump) -> None:
        """Store the dump and the weights, which are in the dtype to compute in."""
        self.weights, self.config, self.dump = weights, weights.config, dump
        self.n_before = dump.n_before or 0  # cached tokens of passes before the dump
        self.stages = {name: (stage, layer) for name, stage, layer in keys(weights.config)}
        self.order = {name: index for index, name in enumerate(self.stages)}
        self.layer_weights = lru_cache(maxsize=2)(
            lambda layer: weights if layer is None else dict(weights.layer(layer))
        )
        self._read = lru_cache(maxsize=64)(self._read_fed)

    def tokens(self, n_pass: int) -> Tokens:
        """Return the tokens of a pass."""
        return self.dump.passes[n_pass]

    def pass_ref(self, n_pass: int) -> Pass:
        """Return the `Pass` with the ids and the first position of a pass."""
        return Pass(self.tokens(n_pass).ids, self.tokens(n_pass).first_position)

    def n_cached(self, n_pass: int) -> int:
        """Count the tokens that earlier passes left in the cache."""
        return self.n_before + sum(len(tokens.ids) for tokens in self.dump.passes[:n_pass])

    def shape(self, n_pass: int, name: str) -> tuple[int, ...]:
        """Return the shape of a stage of a pass for all tokens of the pass."""
        seq = len(self.tokens(n_pass).ids)
        return self.stages[name][0].shape(self.config, seq=seq, ctx=self.n_cached(n_pass) + seq)

    def fed(self, n_pass: int, name: str) -> np.ndarray | None:
        """Return the engine's array if it may replace llorch's: all tokens, right shape, possible values; else None.

        Keys that a sliding-window cache has dropped become NaN, see `_fill_dropped_keys`.
        """
        return self._read(n_pass, name) if (n_pass, name) in self.dump.dumped else None

    def _read_fed(self, n_pass: int, name: str) -> np.ndarray | None:
        dumped = self.dump.dumped[n_pass, name]
        if dumped.tokens is not None and dumped.tokens != tuple(range(len(self.tokens(n_pass).ids))):
            return None
        if dumped.heads is not None or (dumped.keys is not None and "seq" in self.stages[name][0].axes.split()):
            return None
        array, n_missing = dumped.read(), 0
        if dumped.keys is not None:
            n_missing = self.shape(n_pass, name)[1] - dumped.keys
        if not self._is_possible(self.stages[name][0], array).all():
            return None
        if n_missing:
            array = np.pad(array, [(0, 0), (n_missing, 0), (0, 0)], constant_values=np.nan)
        return array.astype(self._dtype(name)) if array.shape == self.shape(n_pass, name) else None

    def _is_possible(self, stage: Stage, array: np.ndarray) -> np.ndarray:
        """Mark the values that are possible in a stage: numbers, masked entries, ids of existing experts."""
        if stage.is_selection and self.config.experts is not None:
            return (array >= 0) & (array < self.config.experts.n_experts)
        return np.isfinite(array) | (np.isneginf(array) if stage.masked else False)

    def _dtype(self, name: str) -> Any:
        return np.int64 if self.stages[name][0].is_selection else self.weights.dtype

    def part_of(self, name: str) -> int:
        """Return the part of the model that a stage is in: EMBED, a layer, or the number of layers."""
        stage, layer = self.stages[name]
        return layer if layer is not None else EMBED if stage.name == "embed" else self.config.n_layers

    def first_part(self, n_pass: int, part: int) -> int:
        """Return the part where a run must begin to reach `part`: the nearest earlier one whose input is dumped."""
        while part > EMBED and self.fed(n_pass, self.input_of(part)) is None:
            part -= 1
        return part

    def input_of(self, part: int) -> str:
        """Return the key of the stage that a part after EMBED reads."""
        return "embed" if part == 0 else key("block_out", part - 1)

    def ran_since(self, n_pass: int, name: str) -> tuple[str, ...]:
        """List the stages that ran between the last dumped stages and `name`, in order, `name` included."""
        stage_keys, pending = set[str](), [name]
        while pending:
            stage_key = pending.pop()
            if stage_key in stage_keys:
                continue
            stage_keys.add(stage_key)
            stage, layer = self.stages[stage_key]
            inputs = input_keys(stage, layer, self.config)
            pending += [input_name for input_name in inputs if self.fed(n_pass, input_name) is None]
        return tuple(sorted(stage_keys, key=self.order.__getitem__))

    def run(
        self,
        n_pass: int,
        observe: StageObserver,
        past: "Past",
        change: Change = UNCHANGED,
        *,
        first: int = EMBED,
        last: int | None = None,
        x: np.ndarray | None = None,
        fed: bool = True,
    ) -> Arrays:
        """Run the parts of the model from `first` to `last` (None: to the end); return the last part's arrays.

        `observe` is called with each stage as llorch computed it; then, if `fed`, the engine's array replaces it.
        `past` holds the caches before the pass; the run adds the caches after it. `x` is the input of the first part;
        None takes the engine's array, which the dump must have.
        """
        original = LayerSetting(self.config, self.pass_ref(n_pass).positions, self.n_cached(n_pass), self.layer_weights)
        setting = change.setting(original)
        if x is None and first > EMBED:
            x = self.fed(n_pass, self.input_of(first))
            assert x is not None, self.input_of(first)
        passed: Arrays = {} if x is None else {self.input_of(first): x}
        for part in range(first, (self.config.n_layers if last is None else last) + 1):
            passed = self._run_part(n_pass, part, passed, observe, past, change, setting, fed=fed)
        return passed

    def _run_part(
        self, n_pass: int, part: int, previous: Arrays, observe: StageObserver, past: "Past", change: Change,
        setting: LayerSetting, *, fed: bool,
    ) -> Arrays:  # fmt: skip
        """Run one part of the model on the arrays of the part before it."""
        config, w = setting.config, setting.layer_weights(part if 0 <= part < self.config.n_layers else None)
        passed = {self.input_of(part): previous[self.input_of(part)]} if part > EMBED else {}

        def record(name: str, array: np.ndarray, layer: int | None = None) -> np.ndarray:
            stage_key = key(name, layer)
            if (stage_change := change.replaced_stages.get(stage_key)) is not None:
                inputs = self._inputs(n_pass, stage_key, setting, passed, past, stage_change.reads)
                array = np.ascontiguousarray(stage_change.wrong(inputs, name, array), dtype=self._dtype(stage_key))
            observe(stage_key, array)
            engine_array = self.fed(n_pass, stage_key) if fed else None
            array = array if engine_array is None else self._fill_dropped_keys(n_pass, stage_key, engine_array, array)
            passed[stage_key] = change.passed_on[stage_key](array) if stage_key in change.passed_on else array
            return passed[stage_key]

        if part == EMBED:
            record("embed", embedding(np.asarray(self.tokens(n_pass).ids), w["embed_tokens"]))
        elif part < self.config.n_layers:
            x, tables = passed[self.input_of(part)], setting.rope_tables
            parts = parts_of(config, part, setting.positions)
            block(x, w, config, *tables, past.memory(part), partial(record, layer=part), **parts)
            past.note(part, passed)
        else:
            x = record("final_norm", rms_norm(passed[self.input_of(part)], w["final_norm"], eps=config.rms_norm_eps))
            record("logits", linear(x, w[output_matrix(config)]))
        return passed

    def _fill_dropped_keys(self, n_pass: int, name: str, actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
        """Fill the keys (NaN) that the engine's cache has dropped with llorch's."""
        if self.dump.dumped[n_pass, name].keys is None or actual.shape != expected.shape:
            return actual
        return np.where(np.isnan(actual), expected, actual)

    def _inputs(
        self, n_pass: int, stage_key: str, setting: LayerSetting, passed: Arrays, past: "Past", reads: tuple[str, ...]
    ) -> StageInputs:
        """Collect the inputs of a stage for a mistake: earlier stages, caches, weights and positions."""
        stage, layer = self.stages[stage_key]
        names = (*stage.input_names(self.config, layer), *existing_stages(reads, self.config, layer))
        arrays = {name: passed[input_key(name, layer, self.config)] for name in names}
        if layer is not None:
            arrays |= past.caches(layer)
        ids, weights = np.asarray(self.tokens(n_pass).ids), setting.layer_weights(layer)
        return StageInputs(setting.config, weights, arrays, ids, setting.positions, self.weights.dtype, layer)


class Past:
    """Caches and states of all layers before a pass and after it.

    The cache that attention read and that the dump has may differ from the cache that the engine keeps. So later passes
    read the dumped cache if `from_dump`, else the rows that this pass appends.
    """

    def __init__(
        self, config: ModelConfig, dtype: type[np.floating], *,
        cached: dict[int, tuple[np.ndarray, np.ndarray]] | None = None, from_dump: bool = True,
        rounding: CacheRounding = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Create the caches before the first pass; `cached` has the keys and values of earlier tokens by layer, if any.

        For `rounding` see `KVCache`.
        """
        self._rounding = rounding
        if cached is None:
            empty = np.empty((config.n_kv_heads, 0, config.head_dim), dtype)
            cached = dict.fromkeys(range(config.n_layers), (empty, empty))
        self._one_layer_config = replace(config, n_layers=1, layers=())
        self.from_dump, self._first, self._before = from_dump, cached, cached
        self._states = {
            i: DeltaState.empty(config.delta_net, dtype)
            for i in range(config.n_layers)
            if config.delta_net is not None and config.layer(i).mixer == "delta_net"
        }
        self._after: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._states_after: dict[int, DeltaState] = {}

    def caches(self, layer: int) -> dict[str, np.ndarray]:
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
        """Append rows (seq, kv_heads, head_dim) to a layer's cache; return keys and values of the whole context."""
        rounding = {0: self._rounding[layer]} if layer in self._rounding else {}
        cache = KVCache(self._one_layer_config, self._before[layer][0].dtype.type, rounding=rounding)  # as users run it
        if n_before := self._before[layer][0].shape[1]:
            cache.append(0, *(rows.swapaxes(0, 1) for rows in self._before[layer]))
            cache.advance(n_before)
        self._after[layer] = cache.append(0, k, v)
        return self._after[layer]

    def note(self, layer: int, passed: Arrays) -> None:
        """Store the keys and values of the whole context, as a layer's attention read them, for the next pass.

        Do nothing for a delta net, or unless `from_dump`.
        """
        if self.from_dump and layer not in self._states:
            self._after[layer] = passed[key("k_cache", layer)], passed[key("v_cache", layer)]

    def next(self) -> "Past":
        """Return the caches before the next pass."""
        return self._with(self._before | self._after, self._states | self._states_after)

    def copied(self) -> "Past":
        """Return the caches before the same pass."""
        return self._with(self._before, self._states)

    def empty(self) -> "Past":
        """Return the caches before the first pass."""
        return self._with(
            self._first, {i: DeltaState(np.zeros_like(s.conv), np.zeros_like(s.delta)) for i, s in self._states.items()}
        )

    def _with(self, caches: dict[int, tuple[np.ndarray, np.ndarray]], states: dict[int, DeltaState]) -> "Past":
        past = copy(self)
        past._before, past._after, past._states, past._states_after = caches, {}, states, {}
        return past
