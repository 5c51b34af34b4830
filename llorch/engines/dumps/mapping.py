"""Mapping file (TOML), in which a user maps names of a dump to stages, the intermediate arrays of `stages.table`.

[names]                                # {i} is the layer; "" is no stage
"blk.{i}.rot_q" = "q_rope"
"blk.{i}.qkv" = ["q_proj", "k_proj", "v_proj"]
"blk.{i}.qk" = "kq"                    # query times key, neither scaled nor masked

[layout.q_rope]                        # a stage, or a name above
axes = "batch heads seq head_dim"      # or transposed = true: the axes of the table in reverse
permuted = "interleaved"               # RoPE rotates neighbouring pairs
value_heads = "tiled"                  # value heads of a delta net are in the order of Qwen3.5's GGUF files
times = 0.25                           # dumped values are the stage times 0.25
masked = false                         # attn_scores before the mask
fused = "groups"                       # order of rows: stacked, groups (by key head), alternating

[run]
ids = [1, 5, 8]                        # or one list for each pass; with attention_mask, for each row of a batch
first_position = 0
dtype = "bfloat16"                     # engine, kv_cache, activations, flash_attention, as in `Features`
kv_cache = "int8-row"                  # or int8-token, int8-head, int8-block: the values that share a scale
rank = "1/4"                           # arrays have the heads of rank 1, from 0, of 4 (tensor parallelism)
"""

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from llorch.engines.dumps.batch import read_batch_pass
from llorch.engines.dumps.engine_names import RAW_SCORES
from llorch.engines.dumps.layout import FUSED_ORDERS, DumpLayout
from llorch.engines.dumps.raw import BatchPass, float_type
from llorch.engines.dumps.stage_dump import Features
from llorch.engines.dumps.widths import Share
from llorch.files.mapped import read_regular
from llorch.runtime.errors import FormatError, suggestion
from llorch.runtime.fields import Fields
from llorch.stages.stage_ref import Tokens
from llorch.stages.table import BY_NAME, FUSABLE

_NUMBER = re.compile(r"\\{i(?:\\\+1)?\\}")  # {i} or, for layers counted from 1, {i+1}; after re.escape
_MAX_FILE = 1 << 20  # bytes
_LAYOUT_KEYS = ("axes", "transposed", "permuted", "value_heads", "times", "masked", "fused")
_RUN_KEYS = ("ids", "first_position", "rank", "attention_mask", *(f.name for f in fields(Features)))


@dataclass(frozen=True)
class NameMap:
    """Contents of a mapping file.

    Attributes:
        path: Path of the file, for messages.
        names: Patterns with `{i}` for the layer, and their stages: several for fused projections, none for no stage.
        layers: Layer of a pattern whose stage is that of one layer (`l3.q_rope`).
        layouts: Declared layouts, by stage or by pattern.
        passes: Token ids of the passes, if declared.
        features: Declared attributes of `Features` only.
        share: Rank of the engine, if its arrays have the heads of one rank only.
        batch: The pass of a batch, if declared.
    """

    path: str = ""
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layers: Mapping[str, int] = field(default_factory=dict)
    layouts: Mapping[str, DumpLayout] = field(default_factory=dict)
    passes: tuple[Tokens, ...] = ()
    features: Mapping[str, str | bool] = field(default_factory=dict)
    share: Share | None = None
    batch: tuple[BatchPass, ...] = ()

    def find(self, name: str, layer: int | None) -> tuple[str, int | None] | None:
        """Return the pattern that matches a name, and the layer; None if no pattern matches."""
        for pattern in self.names:
            match = re.fullmatch(_NUMBER.sub("([0-9]{1,4})", re.escape(pattern)), name)
            if match and match.groups():
                return pattern, int(match[1]) - ("{i+1}" in pattern)
            if match:
                return pattern, self.layers.get(pattern, layer)
        return None

    def layout(self, stage: str, pattern: str) -> DumpLayout:
        """Return the layout declared for a name, or else for its stage."""
        return self.layouts.get(pattern) or self.layouts.get(stage) or DumpLayout()


def read_mapping(path: str | Path) -> NameMap:
    """Read and check a mapping file; raise FormatError if it is not TOML, or has an unknown key or invalid value."""
    path = Path(path)
    content = read_regular(path, limit=_MAX_FILE)
    try:
        values = tomllib.loads(content.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise FormatError("Malformed", f"expected TOML, got {error}", path=path) from None
    return mapping_of(values, path)


def mapping_of(sections: Mapping[str, object], path: str | Path = "mapping") -> NameMap:
    """Build a mapping from parsed TOML; raise FormatError like `read_mapping`."""
    _require_known(sections, ("names", "layout", "run"), "", path)
    top = Fields(sections, path)
    names, layouts, run = (top.section(key) or Fields({}, path) for key in ("names", "layout", "run"))
    targets = {pattern: _parse_target(names, pattern) for pattern in names.values}
    stages_by_pattern = {pattern: stages for pattern, (stages, _) in targets.items()}
    layers = {pattern: layer for pattern, (_, layer) in targets.items() if layer is not None}
    layout_names = {**dict.fromkeys((*BY_NAME, RAW_SCORES)), **stages_by_pattern}
    _require_known(layouts.values, layout_names, "layout.", path)
    declared = {}
    for name in layouts.values:
        section = layouts.section(name)
        assert section is not None  # TOML has no null
        declared[name] = _read_layout(name, stages_by_pattern.get(name, (name,)), section, path)
    _require_known(run.values, _RUN_KEYS, "run.", path)
    features = {key: value for key in run.values if (value := _read_feature(run, key)) is not None}
    batch = (read_batch_pass(run, ()),) if run.has("attention_mask") else ()
    passes = () if batch else _read_passes(run)
    return NameMap(str(path), stages_by_pattern, layers, declared, passes, features, _read_share(run), batch)


def _require_known(section: Mapping[str, object], allowed: Collection[str], prefix: str, path: str | Path) -> None:
    """Raise FormatError for an unknown key, and suggest the nearest allowed key."""
    for key in section:
        if key not in allowed:
            message = f"{prefix}{key}: expected one of {', '.join(allowed)}{suggestion(key, allowed)}"
            raise FormatError("Unexpected", message, path=path)


def _parse_target(names: Fields, pattern: str) -> tuple[tuple[str, ...], int | None]:
    """Parse the stages of a pattern, and the layer if the stage is that of one layer."""
    target = names.values[pattern]
    if len(_NUMBER.findall(re.escape(pattern))) > 1:
        raise names.error("Malformed", pattern, "a pattern with at most one {i}", target)
    stages = (target,) if isinstance(target, str) else tuple(target) if isinstance(target, list) else ()
    if stages == ("",):
        return (), None
    layer = re.fullmatch(r"l([0-9]{1,4})\.(\w+)", target) if isinstance(target, str) else None
    stages = (layer[2],) if layer else stages
    fusable = tuple(name for names in FUSABLE for name in names)
    allowed = (*BY_NAME, RAW_SCORES) if isinstance(target, str) else fusable
    for stage in stages or (target,):
        if not isinstance(stage, str) or stage not in allowed or stages.count(stage) > 1:
            hint = suggestion(stage, allowed) if isinstance(stage, str) else ""
            projections = f"projections of {', '.join(fusable)}"
            expected = projections if allowed is fusable else "a stage (see llorch.stages.table)"
            error = names.error("Malformed", pattern, expected, stage)
            raise FormatError(error.code, error.message + hint, path=error.path)
    return stages, int(layer[1]) if layer else None


def _read_layout(name: str, stages: tuple[str, ...], section: Fields, path: str | Path) -> DumpLayout:
    """Read the `layout` section of a name or stage: axes, row order, fused parts, factor."""
    _require_known(section.values, _LAYOUT_KEYS, f"layout.{name}.", path)
    axes = tuple(section.text("axes", default="").split())
    if section.boolean("transposed", default=False):
        if axes:
            raise section.error("Inconsistent", "transposed", "axes or transposed, not both", axes)
        table = BY_NAME["attn_scores" if stages == (RAW_SCORES,) else stages[0]].axes if stages else ""
        axes = tuple(reversed(table.split() if len(stages) == 1 else ("seq", "width")))
    section.refuse("permuted", unless=("", "interleaved"), default="")
    section.refuse("value_heads", unless=("", "tiled"), default="")
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
        tiled=section.text("value_heads", default="") == "tiled",
    )


def _read_feature(run: Fields, key: str) -> str | bool | None:
    """Read one attribute of `Features` from the `run` section; None for the other keys."""
    if key not in {f.name for f in fields(Features)}:
        return None
    if key in ("dtype", "kv_cache"):
        return float_type(run, key)
    return run.boolean(key, default=False) if key == "flash_attention" else run.text(key)


def _read_share(run: Fields) -> Share | None:
    """Read the rank of the engine, like `1/4`; None if it is not declared."""
    text = run.text("rank", default="")
    rank, _, n = text.partition("/")
    if not text:
        return None
    if not (rank.isdecimal() and n.isdecimal() and int(rank) < int(n)):
        raise run.error("Malformed", "rank", 'a rank from 0 and the number of ranks, like "1/4"', text)
    return Share(int(rank), int(n))


def _read_passes(run: Fields) -> tuple[Tokens, ...]:
    """Read the passes in order; each starts after the tokens of the previous passes."""
    first = run.integer("first_position", default=0, low=0)
    declared = run.values.get("ids", [])
    lists = declared if isinstance(declared, list) and declared and isinstance(declared[0], list) else [declared]
    passes = []
    for ids in lists if declared else ():
        if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
            raise run.error("Malformed", "ids", "a list of token ids, or one list for each pass", declared)
        passes.append(Tokens(tuple(ids), first))
        first += len(ids)
    return tuple(passes)
