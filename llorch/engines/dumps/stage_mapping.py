"""From arrays under the names of their engine to stages of the table: `stage_dump`."""

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from llorch.engines.dumps.engine_names import RAW_SCORES, Meaning, meaning_of, nameless
from llorch.engines.dumps.ids import passes_of
from llorch.engines.dumps.layout import DumpLayout
from llorch.engines.dumps.mapping import NameMap
from llorch.engines.dumps.raw import RawArray, RawDump
from llorch.engines.dumps.reading import NamedArray, StageReader, tokens_before
from llorch.engines.dumps.stage_dump import DumpedArray, Features, StageDump
from llorch.families.config import ModelConfig
from llorch.files import Weights
from llorch.runtime.errors import FormatError, GuardFailed
from llorch.stages.table import BY_NAME, key

PRODUCTION = "production_logits"  # of the run that nobody watched
_SHOWN_NAMES = 8
_FLOATS = ("float32", "float16", "bfloat16", "float64")
_IDS = ("int64", "int32", "uint32")


@dataclass
class Names:
    """What the names of a dump stand for; the arrays of which that is not known, and sentences on what was assumed."""

    named: list[NamedArray] = field(default_factory=list)
    unnamed: list[tuple[int, RawArray]] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    elsewhere: dict[str, set[int | None]] = field(default_factory=dict)  # stages, in layers that have no such stage

    def notes(self) -> list[str]:
        """List assumptions and what was left out."""
        layers = {stage: ", ".join(map(str, sorted(found, key=str))) for stage, found in self.elsewhere.items()}
        return [
            *self.assumed,
            *(
                f"llorch left out {stage} of layer {said}: this model has no {stage} in that layer"
                for stage, said in layers.items()
            ),
        ]


def stage_dump(
    raw: RawDump,
    config: ModelConfig,
    *,
    mapping: NameMap | None = None,
    ids: Sequence[int] | None = None,
    first_position: int = 0,
    weights: Weights | None = None,
) -> StageDump:
    """Find out which stages the arrays of a dump are, and in which layout; arrays are read later, one by one.

    `ids` and `first_position` are tokens of the only pass, where neither dump nor mapping has them. With `weights`
    llorch's own run decides where a shape fits several orders of the axes, and finds tokens that nobody states.
    FormatError: no ids; a stage twice; a layer that the model does not have; no array that is a stage. GuardFailed: the
    same is stated in two ways; an array fits its stage in no layout.
    """
    mapping = mapping or NameMap()
    names = names_of(raw, config, mapping)
    if not names.named:
        raise _without_stages(raw, weights)
    embeddings = {named.n_pass: named.array for named in names.named if named.stages == ("embed",)}
    passes, notes_on_ids = passes_of(raw, mapping, ids, first_position, weights, embeddings, config.vocab_size)
    n_before = tokens_before(names.named, passes, config)
    reader = StageReader(config, passes, weights, n_before or 0)
    stages, left_out = _stages(raw, names.named, reader)
    notes = [*raw.notes, *notes_on_ids, *names.notes(), *reader.notes(), *left_out, *_about_unnamed(names.unnamed)]
    features = Features(**asdict(raw.features) | mapping.features)  # type: ignore[arg-type] (checked when it was read)
    production = _production_logits(raw, names, reader)
    return StageDump(raw.source, passes, stages, features, tuple(dict.fromkeys(notes)), production, n_before)


def _production_logits(raw: RawDump, names: Names, reader: StageReader) -> dict[int, DumpedArray]:
    """Find the logits of the run that nobody watched, by pass."""
    production = ((n_pass, array) for n_pass, array in names.unnamed if array.name == PRODUCTION)
    named = [NamedArray(n_pass, array, ("logits",), None, DumpLayout()) for n_pass, array in production]
    logits, _ = _stages(raw, named, reader)
    return {n_pass: dumped for (n_pass, _), dumped in logits.items()}


def _without_stages(raw: RawDump, weights: Weights | None) -> FormatError:
    names = _patterns(raw.arrays)
    words = ("llorch", "diff", "--suggest", raw.source, "--model", "MODEL" if weights is None else str(weights.path))
    actual = (
        f"got {len(raw.arrays)} arrays with other names ({', '.join(names[:_SHOWN_NAMES])})"
        if names
        else "got no array"
    )
    command = f"draft a mapping with: {shlex.join(words)} > names.toml, and give it with --map names.toml"
    return FormatError("Missing", f"stages: expected arrays with names of stages, {actual}; {command}", path=raw.source)


def names_of(raw: RawDump, config: ModelConfig, mapping: NameMap) -> Names:
    """Find the stages that every name stands for; an array that is known to be no stage is left out.

    The mapping takes precedence over the names that engines use. FormatError if the model does not have the stage or
    the layer, or if the stage does not hold such numbers.
    """
    names = Names()
    times = Counter((n_pass, array.name, array.layer) for n_pass, array in raw.arrays)
    before: Counter[tuple[int, str, int | None]] = Counter()
    node: Meaning | None = None  # the last one of llama.cpp that is a stage
    for n_pass, array in raw.arrays:
        pattern, place = "", (n_pass, array.name, array.layer)
        if mapped := mapping.find(array.name, array.layer):
            pattern, layer = mapped
            meaning = Meaning(mapping.names[pattern], layer)
        else:
            meaning = meaning_of(array.name, array.layer, config, op=array.op, nth=before[place], of=times[place])
            meaning = meaning or nameless(array.name, array.op, node, config)
        before[place] += 1
        if meaning is None:
            names.unnamed.append((n_pass, array))
        elif meaning.stages and (other := _of_other_layers(meaning, config)):
            names.elsewhere.setdefault(other, set()).add(meaning.layer)
        elif meaning.stages:
            node = meaning if meaning.by_llamacpp else None
            layout = mapping.layout(meaning.stages[0], pattern)
            names.named.append(_named_array(raw.source, n_pass, array, meaning, layout, config))
            names.assumed += [meaning.assumed] if meaning.assumed else []
    return names


def _named_array(
    source: str, n_pass: int, array: RawArray, meaning: Meaning, layout: DumpLayout, config: ModelConfig
) -> NamedArray:
    """Make the array of a name whose stages are known; FormatError if the model has no such stage in that layer."""
    stages = meaning.stages
    if stages == (RAW_SCORES,):
        layout = replace(layout, times=layout.times * config.head_dim**0.5, masked=False)
        stages = ("attn_scores",)
    stage, subject = BY_NAME[stages[0]], f"{key(array.name, array.layer)} ({' '.join(meaning.stages)})"
    if stage.in_layer != (meaning.layer is not None) or not 0 <= (meaning.layer or 0) < config.n_layers:
        wanted = f"a layer from 0 to {config.n_layers - 1}" if stage.in_layer else "no layer"
        raise FormatError("OutOfRange", f"{subject}: expected {wanted}, got {meaning.layer}", path=source)
    if not stage.applies_to(config, meaning.layer):
        raise FormatError("Unexpected", f"{subject}: expected a stage that a {config.family} model has", path=source)
    known = _IDS + _FLOATS if stage.is_choice else _FLOATS
    if array.stored not in known:
        raise FormatError("DType", f"{subject}: expected {', '.join(known)}, got {array.stored}", path=source)
    return NamedArray(n_pass, array, stages, meaning.layer, layout, meaning.by_llamacpp)


def _of_other_layers(meaning: Meaning, config: ModelConfig) -> str | None:
    """Return the name of a stage that other layers of the model have, e.g. RoPE, and this layer has not; else None."""
    stage = BY_NAME.get(meaning.stages[0])
    if stage is None or meaning.layer is None or not stage.in_layer or not 0 <= meaning.layer < config.n_layers:
        return None
    return stage.name if stage.applies_to(config) and not stage.applies_to(config, meaning.layer) else None


def _stages(
    raw: RawDump, named: Sequence[NamedArray], reader: StageReader
) -> tuple[dict[tuple[int, str], DumpedArray], list[str]]:
    """Collect stages by pass and stage key, and notes on arrays whose stage was there already."""
    found: dict[tuple[int, str], DumpedArray] = {}
    notes = []
    for each in named:
        try:
            parts = reader.dumped(each)
        except FormatError as error:
            message = f"{each.array.name} ({' '.join(each.stages)}): {error.message}"
            if error.code == "Shape":
                raise GuardFailed("layout", message, source=raw.source) from None
            raise FormatError(error.code, message, path=raw.source) from None
        for stage, dumped in parts.items():
            place = each.n_pass, key(stage, each.layer)
            first = found.setdefault(place, dumped)
            if first is dumped or each.by_llamacpp:  # whose reshapes have the name of what they reshape
                continue
            if first.name == dumped.name:
                message = f"{dumped.name}: expected one array in pass {each.n_pass}, got two"
                raise FormatError("Duplicate", f"{message}; begin a new pass for each run", path=raw.source)
            notes.append(f"{dumped.name} is {place[1]}, like {first.name}: left out")
    return found, notes


def _about_unnamed(unnamed: Sequence[tuple[int, RawArray]]) -> list[str]:
    """Write one note on all unnamed arrays, with numbers as {i}."""
    unnamed = [(n_pass, array) for n_pass, array in unnamed if array.name != PRODUCTION]
    if not unnamed:
        return []
    patterns = _patterns(unnamed)
    more = f" and {len(patterns) - _SHOWN_NAMES} more" if len(patterns) > _SHOWN_NAMES else ""
    return [
        f"llorch left out {len(unnamed)} arrays, because their stage is unknown: "
        f"{', '.join(patterns[:_SHOWN_NAMES])}{more}; name the arrays in a mapping, drafted by llorch diff --suggest"
    ]


def _patterns(arrays: Sequence[tuple[int, RawArray]]) -> list[str]:
    """List the names of arrays, each once, with numbers as {i}."""
    return [*dict.fromkeys(re.sub(r"[0-9]+", "{i}", array.name) for _, array in arrays)]
