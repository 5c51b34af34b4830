"""Drafts a mapping for a dump with names of its own.

A pattern of names is the stage whose values are most alike. Behind a mistake nothing is alike any more: there the
order of writing decides among the stages of its shape.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from llorch.engines.dumps.engine_names import RAW_SCORES
from llorch.engines.dumps.ids import ids_from_embedding, passes_of
from llorch.engines.dumps.mapping import NameMap
from llorch.engines.dumps.match_stages import Guess, Pattern, compare, patterns_of
from llorch.engines.dumps.raw import RawArray, RawDump
from llorch.engines.dumps.reading import table_axes
from llorch.engines.dumps.stage_mapping import names_of
from llorch.files import Weights
from llorch.stages.table import STAGES, key

_ALIKE = 0.1  # unlike ours by at most that: this stage, wherever it was written
_STILL_ALIKE = 0.7  # behind a mistake
_SAME_SIZE = 0.02
_LEFT_OUT = 2.0  # what no stage costs, in unlikeness
_TRIED = 4  # arrays, each beside the whole embedding table
_HEAD = (
    "# A draft for --map, from shapes and values. Check each line; start with arrays that match llorch least.",
    '# [layout.STAGE] holds facts that shapes do not show: axes = "heads seq head_dim", transposed = true,',
    '# permuted = "interleaved", times = 0.125, masked = false, fused = "groups".',
)
_Choice = tuple[float, dict[str, Guess]]  # what it costs, by the name of the pattern


def suggest(raw: RawDump, weights: Weights, ids: Sequence[int] = (), *, first_position: int = 0) -> str:
    """Draft a mapping for the arrays of a dump whose names nobody knows: a TOML file, each line with how sure it is.

    `ids` and `first_position` are its tokens, where it does not state them; without any they are found in an array of
    embeddings, or FormatError is raised.
    """
    config = weights.config
    unnamed = names_of(raw, config, NameMap()).unnamed
    embeddings = {} if raw.passes or ids else _embeddings(unnamed, weights)
    passes, found = passes_of(raw, NameMap(), ids, first_position, weights, embeddings, config.vocab_size)
    patterns = patterns_of(unnamed, config.n_layers)
    compare(patterns, weights, passes)
    offset = _counted_from(patterns)
    chosen = _choose_stages(patterns, offset)
    lines = [*_HEAD, "", "[names]"]
    lines += [_name_line(pattern, chosen.get(pattern.name), offset, config.head_dim) for pattern in patterns]
    rotated = {g.stages[0][0] for g in chosen.values() if g.layout.permuted and g.stages[0].endswith("_rope")}
    for pattern in patterns:
        guess = chosen.get(pattern.name)
        if guess is not None and guess.unlike <= _ALIKE:
            lines += _layout_lines(pattern, guess, offset, rotated)
    if not raw.passes:
        lines += ["", "[run]", *(f"# {note}" for note in found)]
        lines += [f"ids = {[[*each.ids] for each in passes]}", f"first_position = {passes[0].first_position}"]
    return "\n".join(lines) + "\n"


def _embeddings(unnamed: Sequence[tuple[int, RawArray]], weights: Weights) -> dict[int, RawArray]:
    """Find, for each pass, an array whose rows are rows of the embedding table.

    Only the first arrays of that width are tried.
    """
    width = weights.config.hidden_size
    found: dict[int, RawArray] = {}
    tried: Counter[int] = Counter()
    for n_pass, array in unnamed:
        if array.shape[-1:] != (width,) or n_pass in found or tried[n_pass] == _TRIED:
            continue
        tried[n_pass] += 1
        if ids_from_embedding(array.read().reshape(-1, width), weights) is not None:
            found[n_pass] = array
    return found


def _counted_from(patterns: Sequence[Pattern]) -> int:
    """Decide whether layers count from 0 or 1, by the numbering whose values are more alike."""
    alike = [
        sum(1 - min((g.unlike for g in pattern.guesses.values() if g.offset == offset), default=1.0)
            for pattern in patterns if pattern.is_numbered)
        for offset in (0, 1)
    ]  # fmt: skip
    return int(alike[1] > alike[0])


def _choose_stages(patterns: Sequence[Pattern], offset: int) -> dict[str, Guess]:
    """Choose a stage for each pattern, none twice: first by similar values, then by the order of writing."""
    open_to = {pattern.name: [*_possible(pattern, offset)] for pattern in patterns}
    chosen: dict[str, Guess] = {}

    def is_free(guess: Guess) -> bool:
        others = [other.stages for other in chosen.values() if other.offset == guess.offset]
        return not any(set(guess.stages) & set(stages) for stages in others)

    alike = [(guess, name) for name, guesses in open_to.items() for guess in guesses if guess.unlike <= _ALIKE]
    for guess, name in sorted(alike, key=lambda each: (round(each[0].unlike, 3), each[0].row)):
        if name not in chosen and is_free(guess):
            chosen[name] = guess
    return chosen | _in_order({name: [*filter(is_free, guesses)] for name, guesses in open_to.items()}, chosen)


def _possible(pattern: Pattern, offset: int) -> Iterator[Guess]:
    """Yield the guesses that agree with the numbering of layers; a name with `rot` or `rope` is a rotated stage."""
    is_rotated = re.search("rot|rope", pattern.name, re.IGNORECASE) is not None
    for guess in pattern.guesses.values():
        is_rope = guess.stages[0].endswith("_rope")
        if (not pattern.is_numbered or guess.offset in (offset, None)) and (is_rope or not is_rotated):
            yield guess


def _in_order(open_to: dict[str, list[Guess]], chosen: Mapping[str, Guess]) -> dict[str, Guess]:
    """Assign the remaining patterns so that stages between those already chosen follow the order of the table."""
    cheapest: dict[int, _Choice] = dict.fromkeys(range(-1, len(STAGES)), (0.0, {}))  # of what is behind a row
    for name, guesses in reversed(open_to.items()):
        if name in chosen:
            cheapest = dict.fromkeys(cheapest, cheapest[chosen[name].row])
            continue
        before = {}
        for row, (cost, rest) in cheapest.items():
            options = [(cost + _LEFT_OUT, rest)]
            for guess in guesses:
                if guess.row > row:
                    cost, rest = cheapest[guess.row]
                    size = abs(math.log2(guess.times or 1e-9)) / 8
                    options.append((cost + guess.unlike + size, {name: guess, **rest}))
            before[row] = min(options, key=lambda option: option[0])
        cheapest = before
    return cheapest[-1][1]


def _spelled(pattern: Pattern, guess: Guess | None, offset: int) -> str:
    """Spell a name as the mapping file spells it."""
    name = pattern.name
    if pattern.is_numbered and (guess is None or guess.offset is None) and pattern.is_one_name:
        name = pattern.members[0][1].name
    return json.dumps(name.replace("{i}", "{i+1}") if offset else name, ensure_ascii=False)


def _name_line(pattern: Pattern, guess: Guess | None, offset: int, head_dim: int) -> str:
    """Format the TOML line that maps a pattern to its stage, with a comment on how sure it is."""
    name = _spelled(pattern, guess, offset)
    if guess is None:
        return f'# {name} = ""  # {pattern.members[0][1].shape} fits no remaining stage'
    stages, times = guess.stages, guess.times
    if stages == ("attn_scores",) and guess.unmasked and abs(times / math.sqrt(head_dim) - 1) < _SAME_SIZE:
        stages, times = (RAW_SCORES,), 1.0
    stage, *others = stages
    target = stages if others else key(stage, None if pattern.is_numbered else guess.offset)
    sure = f"{math.sqrt(1 - guess.unlike**2):.4f} alike"
    if guess.unlike > _ALIKE:
        sure += ", by shape and order only" if guess.unlike > _STILL_ALIKE else ", in this order"
    elif abs(times - 1) > _SAME_SIZE:
        sure += f", {times:.4g} times ours"
    return f"{name} = {json.dumps(target)}  # {sure}"


def _layout_lines(pattern: Pattern, guess: Guess, offset: int, rotated: Collection[str]) -> list[str]:
    """List the lines of a layout: axes, fused, masked, and permuted, as a comment unless q or k is in `rotated`."""
    lines = []
    if guess.read.form.differs_from(table_axes(guess.stages)):
        lines.append(f'axes = "{guess.read.form}"')
    if guess.layout.fused != "stacked":
        lines.append(f'fused = "{guess.layout.fused}"')
    if guess.unmasked and abs(guess.times - 1) < _SAME_SIZE:
        lines.append("masked = false")
    if guess.layout.permuted and guess.stages[0][0] in rotated:
        lines.append('permuted = "interleaved"')
    elif guess.layout.permuted:
        when = "only if RoPE rotates neighbouring pairs; otherwise the rows have GGUF order"
        lines.append(f'# permuted = "interleaved"  # {when}')
    is_stage = pattern.is_numbered and len(guess.stages) == 1
    about = guess.stages[0] if is_stage else _spelled(pattern, guess, offset)
    return ["", f"[layout.{about}]", *lines] if lines else []
