"""Map the arrays of a dump, by the engine's names, to stages (named intermediate arrays of `stages.table`)."""

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
from llorch.engines.dumps.reading import NamedArray, StageReader, count_earlier_tokens
from llorch.engines.dumps.stage_dump import DumpedArray, Features, StageDump
from llorch.families.config import ModelConfig
from llorch.files import Weights
from llorch.runtime.errors import FormatError, GuardFailed
from llorch.stages.stage_ref import Tokens
from llorch.stages.table import BY_NAME, key

LEFT_OUT = "left out, because the array has another shape (see the notes)"
PRODUCTION = "production_logits"  # name of logits from a run without recording
_SHOWN_NAMES = 8  # in messages
_FEW_STAGES = 2  # stages of which no array fits
_FLOATS = ("float32", "float16", "bfloat16", "float64")
_IDS = ("int64", "int32", "uint32")  # dtypes of stages with expert ids


@dataclass
class Names:
    """Arrays of a dump with their stages, arrays with unknown names, and assumptions."""

    named: list[NamedArray] = field(default_factory=list)
    unnamed: list[tuple[int, RawArray]] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    absent: dict[str, set[int | None]] = field(default_factory=dict)  # dumped stage -> layers that should not have it

    def notes(self) -> list[str]:
        """Return notes on assumptions and on stages that were left out."""
        layers = {stage: ", ".join(map(str, sorted(layer_set, key=str))) for stage, layer_set in self.absent.items()}
        return [
            *self.assumed,
            *(
                f"llorch left out {stage} of layer {layer_list}: this model has no {stage} in that layer"
                for stage, layer_list in layers.items()
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
    """Identify the stage and layout of every array of a dump; each array is read only when it is used.

    `ids` and `first_position` are the tokens of the only pass, if neither dump nor mapping declares them. With
    `weights`, llorch's run chooses between orders of axes that fit a shape, and detects undeclared tokens. An array
    that fits no layout of its stage is left out. Raise FormatError if there are no token ids, a stage occurs twice, a
    layer does not exist, or no array is a stage. Raise GuardFailed if declarations contradict each other, or no array
    fits its stage.
    """
    mapping = mapping or NameMap()
    names = resolve_names(raw, config, mapping)
    if not names.named:
        raise _no_stages_error(raw, weights)
    embeddings = {named.n_pass: named.array for named in names.named if named.stages == ("embed",)}
    passes, notes_on_ids = passes_of(raw, mapping, ids, first_position, weights, embeddings, config.vocab_size)
    n_before = count_earlier_tokens(names.named, passes, config)
    reader = StageReader(config, passes, weights, n_before or 0, mapping.share)
    stages, left_out, repeated = _collect_stages(raw, names.named, reader)
    _require_fitting(raw, left_out, passes, n_stages=len(stages))
    notes = [*raw.notes, *notes_on_ids, *names.notes(), *reader.notes(), *_note_left_out(left_out), *repeated]
    notes = tuple(dict.fromkeys([*notes, *_note_unnamed(names.unnamed)]))
    features = Features(**asdict(raw.features) | mapping.features)  # type: ignore[arg-type] (checked when it was read)
    defects = tuple(reader.defects)
    return StageDump(
        raw.source, passes, stages, features, notes, _production_logits(raw, names, reader), n_before, defects=defects,
        left_out={LEFT_OUT: [(named.n_pass, key) for named, _ in left_out for key in named.keys]} if left_out else {},
    )  # fmt: skip


def _production_logits(raw: RawDump, names: Names, reader: StageReader) -> dict[int, DumpedArray]:
    """Return the logits of the run without recording, by pass."""
    production = ((n_pass, array) for n_pass, array in names.unnamed if array.name == PRODUCTION)
    named = [NamedArray(n_pass, array, ("logits",), None, DumpLayout()) for n_pass, array in production]
    logits, left_out, _ = _collect_stages(raw, named, reader)
    if left_out:
        raise _wrong_layout(raw, *left_out[0])
    return {n_pass: dumped for (n_pass, _), dumped in logits.items()}


def _no_stages_error(raw: RawDump, weights: Weights | None) -> FormatError:
    names = _list_patterns(raw.arrays)
    argv = ("llorch", "diff", "--suggest", raw.source, "--model", "MODEL" if weights is None else str(weights.path))
    actual = (
        f"got {len(raw.arrays)} arrays with other names ({', '.join(names[:_SHOWN_NAMES])})"
        if names
        else "got no array"
    )
    command = f"draft a mapping with: {shlex.join(argv)} > names.toml, and give it with --map names.toml"
    return FormatError("Missing", f"stages: expected arrays with names of stages, {actual}; {command}", path=raw.source)


def resolve_names(raw: RawDump, config: ModelConfig, mapping: NameMap) -> Names:
    """Map every name to stages; leave out arrays that are no stage, or a stage that only other layers have.

    The mapping takes precedence over the names of engines. Raise FormatError if no layer of the model has the stage,
    the layer does not exist, or the array has a wrong dtype.
    """
    names = Names()
    n_total = Counter((n_pass, array.name, array.layer) for n_pass, array in raw.arrays)
    n_seen: Counter[tuple[int, str, int | None]] = Counter()
    node: Meaning | None = None  # last stage, if it is a llama.cpp node
    for n_pass, array in raw.arrays:
        pattern, slot = "", (n_pass, array.name, array.layer)  # arrays of one slot differ in their order only
        if match := mapping.find(array.name, array.layer):
            pattern, layer = match
            meaning = Meaning(mapping.names[pattern], layer)
        else:
            meaning = meaning_of(array.name, array.layer, config, op=array.op, nth=n_seen[slot], of=n_total[slot])
            meaning = meaning or nameless(array.name, array.op, node, config)
        n_seen[slot] += 1
        if meaning is None:
            names.unnamed.append((n_pass, array))
        elif meaning.stages and (absent_stage := _only_in_other_layers(meaning, config)):
            names.absent.setdefault(absent_stage, set()).add(meaning.layer)
        elif meaning.stages:
            node = meaning if meaning.by_llamacpp else None
            layout = mapping.layout(meaning.stages[0], pattern)
            names.named.append(_named_array(raw.source, n_pass, array, meaning, layout, config))
            names.assumed += [meaning.assumed] if meaning.assumed else []
    return names


def _named_array(
    source: str, n_pass: int, array: RawArray, meaning: Meaning, layout: DumpLayout, config: ModelConfig
) -> NamedArray:
    """Build an array with its stages; raise FormatError if the model has no such stage in that layer."""
    stages = meaning.stages
    if stages == (RAW_SCORES,):  # attn_scores before scaling by 1 / sqrt(head_dim) and before the mask
        layout = replace(layout, times=layout.times * config.head_dim**0.5, masked=False)
        stages = ("attn_scores",)
    stage, subject = BY_NAME[stages[0]], f"{key(array.name, array.layer)} ({' '.join(meaning.stages)})"
    if stage.in_layer != (meaning.layer is not None) or not 0 <= (meaning.layer or 0) < config.n_layers:
        expected = f"a layer from 0 to {config.n_layers - 1}" if stage.in_layer else "no layer"
        raise FormatError("OutOfRange", f"{subject}: expected {expected}, got {meaning.layer}", path=source)
    if not stage.applies_to(config, meaning.layer):
        raise FormatError("Unexpected", f"{subject}: expected a stage that a {config.family} model has", path=source)
    allowed = _IDS + _FLOATS if stage.is_selection else _FLOATS
    if array.stored not in allowed:
        raise FormatError("DType", f"{subject}: expected {', '.join(allowed)}, got {array.stored}", path=source)
    return NamedArray(n_pass, array, stages, meaning.layer, layout, meaning.by_llamacpp)


def _only_in_other_layers(meaning: Meaning, config: ModelConfig) -> str | None:
    """Return the stage name if only other layers of the model have the stage, e.g. RoPE; else None."""
    stage = BY_NAME.get(meaning.stages[0])
    if stage is None or meaning.layer is None or not stage.in_layer or not 0 <= meaning.layer < config.n_layers:
        return None
    return stage.name if stage.applies_to(config) and not stage.applies_to(config, meaning.layer) else None


_Misfit = tuple[NamedArray, FormatError]  # array that fits no layout of its stage, and the reason


def _collect_stages(
    raw: RawDump, named: Sequence[NamedArray], reader: StageReader
) -> tuple[dict[tuple[int, str], DumpedArray], list[_Misfit], list[str]]:
    """Collect stages by pass and stage key, arrays whose shape does not fit, and notes on repeated stages."""
    stages: dict[tuple[int, str], DumpedArray] = {}
    notes: list[str] = []
    read, misfits = _read_arrays(raw, named, reader)
    more, misfits = _read_arrays(raw, [named for named, _ in misfits], reader)  # the rank of the heads may be known now
    for named_array, dumped_stages in [*read, *more]:
        for stage, dumped in dumped_stages.items():
            stage_key = named_array.n_pass, key(stage, named_array.layer)
            first = stages.setdefault(stage_key, dumped)
            if first is dumped or named_array.by_llamacpp:  # a reshape in llama.cpp keeps the name of its source
                continue
            if first.name == dumped.name:
                message = f"{dumped.name}: expected one array in pass {named_array.n_pass}, got two"
                raise FormatError("Duplicate", f"{message}; begin a new pass for each run", path=raw.source)
            notes.append(f"{dumped.name} is {stage_key[1]}, like {first.name}: left out")
    return stages, misfits, notes


def _read_arrays(
    raw: RawDump, named: Sequence[NamedArray], reader: StageReader
) -> tuple[list[tuple[NamedArray, dict[str, DumpedArray]]], list[_Misfit]]:
    """Read arrays as their stages; return the arrays that fit, and those whose shape does not."""
    read, misfits = [], []
    for named_array in named:
        try:
            read.append((named_array, reader.dumped(named_array)))
        except FormatError as error:
            if error.code != "Shape":
                message = f"{named_array.array.name} ({' '.join(named_array.stages)}): {error.message}"
                raise FormatError(error.code, message, path=raw.source) from None
            misfits.append((named_array, error))
    return read, misfits


def _require_fitting(raw: RawDump, left_out: Sequence[_Misfit], passes: Sequence[Tokens], *, n_stages: int) -> None:
    """Raise GuardFailed if the dump seems to be another run's: most arrays do not fit their stages.

    Arrays of the same few stages do not fit if the engine has another width there. `n_stages`: arrays that fit.
    """
    other_tokens = [
        misfit for misfit in left_out if len(passes[misfit[0].n_pass].ids) not in (1, *misfit[0].array.shape)
    ]
    is_other_model = len({named.stages for named, _ in left_out}) > _FEW_STAGES and len(left_out) > n_stages
    if left_out and (not n_stages or is_other_model):
        raise _wrong_layout(raw, *left_out[0])
    if len(other_tokens) > n_stages:
        raise _wrong_layout(raw, *other_tokens[0])


def _wrong_layout(raw: RawDump, named: NamedArray, error: FormatError) -> GuardFailed:
    message = f"{named.array.name} ({' '.join(named.stages)}): {error.message}"
    return GuardFailed("layout", message, source=raw.source)


def _note_left_out(left_out: Sequence[_Misfit]) -> list[str]:
    """Return a note on the arrays of each stage that fit no layout, with all their layers."""
    groups: dict[tuple[str, str], list[NamedArray]] = {}
    for named, error in left_out:
        groups.setdefault((" ".join(named.stages), error.message), []).append(named)
    notes = []
    for (stages, message), arrays in groups.items():
        layers = [str(layer) for layer in dict.fromkeys(named.layer for named in arrays) if layer is not None]
        place = f" of layer{'s' * (len(layers) > 1)} {', '.join(layers)}" if layers else ""
        name = "" if arrays[0].array.name in (stages, arrays[0].keys[0]) else f" ({arrays[0].array.name})"
        notes.append(f"llorch left out {stages}{place}{name}: {message}")
    return notes


def _note_unnamed(unnamed: Sequence[tuple[int, RawArray]]) -> list[str]:
    """Return one note on all unnamed arrays, with numbers as {i}."""
    unnamed = [(n_pass, array) for n_pass, array in unnamed if array.name != PRODUCTION]
    if not unnamed:
        return []
    patterns = _list_patterns(unnamed)
    rest = f" and {len(patterns) - _SHOWN_NAMES} more" if len(patterns) > _SHOWN_NAMES else ""
    return [
        f"llorch left out {len(unnamed)} arrays, because their stage is unknown: "
        f"{', '.join(patterns[:_SHOWN_NAMES])}{rest}; name the arrays in a mapping, drafted by llorch diff --suggest"
    ]


def _list_patterns(arrays: Sequence[tuple[int, RawArray]]) -> list[str]:
    """List the names of arrays, each once, with numbers as {i}."""
    return [*dict.fromkeys(re.sub(r"[0-9]+", "{i}", array.name) for _, array in arrays)]
