"""Draft a mapping file for a dump with unknown names.

A `Pattern` of names is mapped to the stage with the most similar values in llorch's run. After an error in the engine
no values are similar; then the order of writing decides among the stages of the same shape.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from llorch.engines.dumps.engine_names import RAW_SCORES
from llorch.engines.dumps.ids import ids_from_embedding, passes_of
from llorch.engines.dumps.mapping import NameMap
from llorch.engines.dumps.match_stages import Guess, Pattern, group_patterns, match_patterns
from llorch.engines.dumps.raw import RawArray, RawDump
from llorch.engines.dumps.reading import table_axes
from llorch.engines.dumps.stage_mapping import resolve_names
from llorch.files import Weights
from llorch.stages.table import STAGES, key

_ALIKE = 0.1  # largest distance (`Guess.distance`) at which the values decide the stage without the order
_STILL_ALIKE = 0.7  # largest distance at which values still say something, after an error in the engine
_SAME_SIZE = 0.02  # largest relative difference of norms that counts as equal
_LEFT_OUT = 2.0  # cost of a pattern without stage, more than the largest distance, 1
_TRIED = 4  # arrays of a pass that are compared with the embedding table
_HEAD = (
    "# A draft for --map, from shapes and values. Check each line; start with arrays that match llorch least.",
    '# [layout.STAGE] holds facts that shapes do not show: axes = "heads seq head_dim", transposed = true,',
    '# permuted = "interleaved", value_heads = "tiled", times = 0.125, masked = false, fused = "groups".',
)
_Choice = tuple[float, dict[str, Guess]]  # cost, guesses by pattern name


def suggest(raw: RawDump, weights: Weights, ids: Sequence[int] = (), *, first_position: int = 0) -> str:
    """Draft a mapping for arrays with unknown names: a TOML file with a similarity for each line.

    `ids` and `first_position` are the tokens, if the dump does not declare them. Without them, llorch detects the
    tokens from an array of embeddings, or raises FormatError.
    """
    config = weights.config
    unnamed = resolve_names(raw, config, NameMap()).unnamed
    embeddings = {} if raw.passes or ids else _embeddings(unnamed, weights)
    passes, notes = passes_of(raw, NameMap(), ids, first_position, weights, embeddings, config.vocab_size)
    patterns = group_patterns(unnamed, config.n_layers)
    match_patterns(patterns, weights, passes)
    offset = _find_offset(patterns)
    chosen = _choose_stages(patterns, offset)
    lines = [*_HEAD, "", "[names]"]
    lines += [_name_line(pattern, chosen.get(pattern.name), offset, config.head_dim) for pattern in patterns]
    rotated = {g.stages[0][0] for g in chosen.values() if g.layout.permuted and g.stages[0].endswith("_rope")}
    for pattern in patterns:
        g = chosen.get(pattern.name)
        if g is not None and g.distance <= _ALIKE:
            lines += _layout_lines(pattern, g, offset, rotated)
    if not raw.passes:
        lines += ["", "[run]", *(f"# {note}" for note in notes)]
        lines += [f"ids = {[[*tokens.ids] for tokens in passes]}", f"first_position = {passes[0].first_position}"]
    return "\n".join(lines) + "\n"


def _embeddings(unnamed: Sequence[tuple[int, RawArray]], weights: Weights) -> dict[int, RawArray]:
    """Find an array of each pass whose rows are rows of the embedding table, among the first arrays of that width."""
    width = weights.config.hidden_size
    embeddings: dict[int, RawArray] = {}
    n_tried: Counter[int] = Counter()
    for n_pass, array in unnamed:
        if array.shape[-1:] != (width,) or n_pass in embeddings or n_tried[n_pass] == _TRIED:
            continue
        n_tried[n_pass] += 1
        if ids_from_embedding(array.read().reshape(-1, width), weights) is not None:
            embeddings[n_pass] = array
    return embeddings


def _find_offset(patterns: Sequence[Pattern]) -> int:
    """Decide if names count layers from 0 or 1 (the offset), by the numbering with more similar values."""
    similarities = [
        sum(1 - min((guess.distance for guess in pattern.guesses.values() if guess.offset == offset), default=1.0)
            for pattern in patterns if pattern.is_numbered)
        for offset in (0, 1)
    ]  # fmt: skip
    return int(similarities[1] > similarities[0])


def _choose_stages(patterns: Sequence[Pattern], offset: int) -> dict[str, Guess]:
    """Choose a different stage for each pattern: first by similar values, then by the order of writing."""
    allowed = {pattern.name: [*_allowed_guesses(pattern, offset)] for pattern in patterns}
    chosen: dict[str, Guess] = {}

    def is_free(guess: Guess) -> bool:
        used = [chosen_guess.stages for chosen_guess in chosen.values() if chosen_guess.offset == guess.offset]
        return not any(set(guess.stages) & set(stages) for stages in used)

    alike = [(guess, name) for name, guesses in allowed.items() for guess in guesses if guess.distance <= _ALIKE]
    for guess, name in sorted(alike, key=lambda pair: (round(pair[0].distance, 3), pair[0].row)):
        if name not in chosen and is_free(guess):
            chosen[name] = guess
    return chosen | _assign_in_order({name: [*filter(is_free, guesses)] for name, guesses in allowed.items()}, chosen)


def _allowed_guesses(pattern: Pattern, offset: int) -> Iterator[Guess]:
    """Yield the guesses that agree with the numbering of layers; a name with `rot` or `rope` needs a rotated stage."""
    is_rotated = re.search("rot|rope", pattern.name, re.IGNORECASE) is not None
    for guess in pattern.guesses.values():
        is_rope = guess.stages[0].endswith("_rope")
        if (not pattern.is_numbered or guess.offset in (offset, None)) and (is_rope or not is_rotated):
            yield guess


def _assign_in_order(allowed: dict[str, list[Guess]], chosen: Mapping[str, Guess]) -> dict[str, Guess]:
    """Assign the other patterns at least cost, by dynamic programming: stages follow the order of the table.

    The cost of a guess is its distance plus a small term for another norm.
    """
    cheapest: dict[int, _Choice] = dict.fromkeys(range(-1, len(STAGES)), (0.0, {}))  # best choice after a table row
    for name, guesses in reversed(allowed.items()):
        if name in chosen:
            cheapest = dict.fromkeys(cheapest, cheapest[chosen[name].row])
            continue
        updated = {}
        for row, (cost, choice) in cheapest.items():
            options = [(cost + _LEFT_OUT, choice)]
            for guess in guesses:
                if guess.row > row:
                    cost, choice = cheapest[guess.row]
                    norm_cost = abs(math.log2(guess.times or 1e-9)) / 8
                    options.append((cost + guess.distance + norm_cost, {name: guess, **choice}))
            updated[row] = min(options, key=lambda option: option[0])
        cheapest = updated
    return cheapest[-1][1]


def _format_key(pattern: Pattern, guess: Guess | None, offset: int) -> str:
    """Format a pattern as a key of the mapping file, with {i+1} if names count layers from 1."""
    name = pattern.name
    if pattern.is_numbered and (guess is None or guess.offset is None) and pattern.is_one_name:
        name = pattern.members[0][1].name
    return json.dumps(name.replace("{i}", "{i+1}") if offset else name, ensure_ascii=False)


def _name_line(pattern: Pattern, guess: Guess | None, offset: int, head_dim: int) -> str:
    """Format the TOML line that maps a pattern to its stage, with the similarity as a comment."""
    name = _format_key(pattern, guess, offset)
    if guess is None:
        return f'# {name} = ""  # {pattern.members[0][1].shape} fits no remaining stage'
    stages, times = guess.stages, guess.times
    if stages == ("attn_scores",) and guess.unmasked and abs(times / math.sqrt(head_dim) - 1) < _SAME_SIZE:
        stages, times = (RAW_SCORES,), 1.0
    stage, *more_stages = stages
    target = stages if more_stages else key(stage, None if pattern.is_numbered else guess.offset)
    similarity = f"{math.sqrt(1 - guess.distance**2):.4f} alike"
    if guess.distance > _ALIKE:
        similarity += ", by shape and order only" if guess.distance > _STILL_ALIKE else ", in this order"
    elif abs(times - 1) > _SAME_SIZE:
        similarity += f", {times:.4g} times ours"
    return f"{name} = {json.dumps(target)}  # {similarity}"


def _layout_lines(pattern: Pattern, guess: Guess, offset: int, rotated: Collection[str]) -> list[str]:
    """Format the lines of a layout; `permuted` is a comment unless `rotated`, letters of rotated heads, has q or k."""
    lines = []
    if guess.read.form.differs_from(table_axes(guess.stages)):
        lines.append(f'axes = "{guess.read.form}"')
    if guess.layout.fused != "stacked":
        lines.append(f'fused = "{guess.layout.fused}"')
    if guess.unmasked and abs(guess.times - 1) < _SAME_SIZE:
        lines.append("masked = false")
    if guess.layout.tiled:
        lines.append('value_heads = "tiled"')
    if guess.layout.permuted and guess.stages[0][0] in rotated:
        lines.append('permuted = "interleaved"')
    elif guess.layout.permuted:
        condition = "only if RoPE rotates neighbouring pairs; otherwise the rows have GGUF order"
        lines.append(f'# permuted = "interleaved"  # {condition}')
    is_stage = pattern.is_numbered and len(guess.stages) == 1
    section = guess.stages[0] if is_stage else _format_key(pattern, guess, offset)
    return ["", f"[layout.{section}]", *lines] if lines else []
