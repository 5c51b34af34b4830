"""The TOML file in which somebody says what the names of a dump stand for.

[names]                                # {i} is the layer; "" is no stage at all
"blk.{i}.rot_q" = "q_rope"
"blk.{i}.qkv" = ["q_proj", "k_proj", "v_proj"]
"blk.{i}.qk" = "kq"                    # query times key, neither scaled nor masked

[layout.q_rope]                        # of a stage, or of a name above
axes = "batch heads seq head_dim"      # or transposed = true: the axes of the table in reverse
permuted = "interleaved"               # the pairs that RoPE turns are neighbours
times = 0.25                           # the stage times this was written
masked = false                         # of attn_scores: the mask comes later
fused = "groups"                       # rows: stacked, groups (of each key head), alternating

[run]
ids = [1, 5, 8]                        # or a list for each pass
first_position = 0
dtype = "bfloat16"                     # engine, kv_cache, activations, flash_attention, as in `Features`
"""

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from llorch.engines.dumps.engine_names import RAW_SCORES
from llorch.engines.dumps.layout import FUSED_ORDERS, DumpLayout
from llorch.engines.dumps.stage_dump import Features
from llorch.files.mapped import read_regular
from llorch.runtime.errors import FormatError, suggestion
from llorch.runtime.fields import Fields
from llorch.stages.stage_ref import Tokens
from llorch.stages.table import BY_NAME, FUSABLE

_NUMBER = re.compile(r"\\{i(?:\\\+1)?\\}")  # as re.escape leaves it
_MAX_FILE = 1 << 20
_LAYOUT_KEYS = ("axes", "transposed", "permuted", "times", "masked", "fused")
_RUN_KEYS = ("ids", "first_position", *(f.name for f in fields(Features)))


@dataclass(frozen=True)
class NameMap:
    """A mapping file, read.

    Attributes:
        path: Of the file, for messages.
        names: Patterns with `{i}` for the layer, and the stages that they stand for: several where projections are
            fused, none for what is no stage.
        layers: Of patterns whose stage is that of one layer.
        layouts: By stage or by pattern.
        passes: Token ids of the passes, where it states them.
        features: What it says of the engine; only what is stated.
    """

    path: str = ""
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layers: Mapping[str, int] = field(default_factory=dict)
    layouts: Mapping[str, DumpLayout] = field(default_factory=dict)
    passes: tuple[Tokens, ...] = ()
    features: Mapping[str, str | bool] = field(default_factory=dict)

    def find(self, name: str, layer: int | None) -> tuple[str, int | None] | None:
        """Find the pattern that fits a name, and the layer; None if no pattern fits."""
        for pattern in self.names:
            parts = re.fullmatch(_NUMBER.sub("([0-9]{1,4})", re.escape(pattern)), name)
            if parts and parts.groups():
                return pattern, int(parts[1]) - ("{i+1}" in pattern)
            if parts:
                return pattern, self.layers.get(pattern, layer)
        return None

    def layout(self, stage: str, pattern: str) -> DumpLayout:
        """Look up the layout declared for a name, or else for its stage."""
        return self.layouts.get(pattern) or self.layouts.get(stage) or DumpLayout()


def read_mapping(path: str | Path) -> NameMap:
    """Read and check a mapping file; FormatError if it is not TOML, or if a key or value in it is not known."""
    path = Path(path)
    content = read_regular(path, limit=_MAX_FILE)
    try:
        values = tomllib.loads(content.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise FormatError("Malformed", f"expected TOML, got {error}", path=path) from None
    return mapping_of(values, path)


def mapping_of(values: Mapping[str, object], path: str | Path = "mapping") -> NameMap:
    """Build a mapping from values that TOML gives; raise FormatError as `read_mapping` does."""
    _require_known(values, ("names", "layout", "run"), "", path)
    top = Fields(values, path)
    names, layouts, run = (top.section(key) or Fields({}, path) for key in ("names", "layout", "run"))
    targets = {pattern: _target(names, pattern) for pattern in names.values}
    stood_for = {pattern: stages for pattern, (stages, _) in targets.items()}
    fixed = {pattern: layer for pattern, (_, layer) in targets.items() if layer is not None}
    known = {**dict.fromkeys((*BY_NAME, RAW_SCORES)), **stood_for}
    _require_known(layouts.values, known, "layout.", path)
    declared = {}
    for name in layouts.values:
        section = layouts.section(name)
        assert section is not None  # TOML has no null
        declared[name] = _layout_of(name, stood_for.get(name, (name,)), section, path)
    _require_known(run.values, _RUN_KEYS, "run.", path)
    said = {key: value for key in run.values if (value := _feature(run, key)) is not None}
    return NameMap(str(path), stood_for, fixed, declared, _passes_of(run), said)


def _require_known(values: Mapping[str, object], known: Collection[str], prefix: str, path: str | Path) -> None:
    """Refuse keys that are not known, with the nearest known one as a suggestion."""
    for key in values:
        if key not in known:
            message = f"{prefix}{key}: expected one of {', '.join(known)}{suggestion(key, known)}"
            raise FormatError("Unexpected", message, path=path)


def _target(names: Fields, pattern: str) -> tuple[tuple[str, ...], int | None]:
    """Parse the stages that a pattern stands for, and the layer if the pattern names one."""
    value = names.values[pattern]
    if len(_NUMBER.findall(re.escape(pattern))) > 1:
        raise names.error("Malformed", pattern, "a pattern with at most one {i}", value)
    stages = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else ()
    if stages == ("",):
        return (), None
    layer = re.fullmatch(r"l([0-9]{1,4})\.(\w+)", value) if isinstance(value, str) else None
    stages = (layer[2],) if layer else stages
    fusable = tuple(name for names in FUSABLE for name in names)
    known = (*BY_NAME, RAW_SCORES) if isinstance(value, str) else fusable
    for stage in stages or (value,):
        if not isinstance(stage, str) or stage not in known or stages.count(stage) > 1:
            near = suggestion(stage, known) if isinstance(stage, str) else ""
            projections = f"projections of {', '.join(fusable)}"
            expected = projections if known is fusable else "a stage (see llorch.stages.table)"
            error = names.error("Malformed", pattern, expected, stage)
            raise FormatError(error.code, error.message + near, path=error.path)
    return stages, int(layer[1]) if layer else None


def _layout_of(name: str, stages: tuple[str, ...], section: Fields, path: str | Path) -> DumpLayout:
    """Read the `layout` of a name in a mapping: axes, row order, fused parts, factor."""
    _require_known(section.values, _LAYOUT_KEYS, f"layout.{name}.", path)
    axes = tuple(section.text("axes", default="").split())
    if section.boolean("transposed", default=False):
        if axes:
            raise section.error("Inconsistent", "transposed", "axes or transposed, not both", axes)
        table = BY_NAME["attn_scores" if stages == (RAW_SCORES,) else stages[0]].axes if stages else ""
        axes = tuple(reversed(table.split() if len(stages) == 1 else ("seq", "width")))
    section.refuse("permuted", unless=("", "interleaved"), default="")
    section.refuse("fused", unless=FUSED_ORDERS, default="stacked")
    times = section.number("times", default=1.0)
    if times == 0:
        raise section.error("OutOfRange", "times", "a factor other than 0", times)
    return DumpLayout(
        axes,
        permuted=section.text("permuted", default="") == "interleaved",
        times=times,
        masked=section.boolean("masked", default=True),
        fused=section.text("fused", default="stacked"),
    )


def _feature(run: Fields, key: str) -> str | bool | None:
    """Read one key of the `run` table of a mapping; None for the keys that are read elsewhere."""
    if key in ("ids", "first_position"):
        return None
    return run.boolean(key, default=False) if key == "flash_attention" else run.text(key)


def _passes_of(run: Fields) -> tuple[Tokens, ...]:
    """Read the passes in order; each begins after the tokens of the passes before it."""
    first = run.integer("first_position", default=0, low=0)
    given = run.values.get("ids", [])
    lists = given if isinstance(given, list) and given and isinstance(given[0], list) else [given]
    passes = []
    for ids in lists if given else ():
        if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
            raise run.error("Malformed", "ids", "a list of token ids, or one list for each pass", given)
        passes.append(Tokens(tuple(ids), first))
        first += len(ids)
    return tuple(passes)
