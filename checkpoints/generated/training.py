"""The generated parts of the pages of checkpoints 15 to 20."""

import math
from collections.abc import Iterator, Mapping, Sequence

from checkpoints.generated.tables import ENGINES, Blocks, equal, link, mistakes, roughly, short, table
from llorch.judging.expectations.training_places import LLAMACPP, MODES, PEFT, TRANSFORMERS
from llorch.judging.expectations.training_stages import BY_GROUP, TRAINING_STAGES
from llorch.judging.goldens.training import HALF_DTYPES, MODELS, TRUTH, TrainingGolden, read
from llorch.judging.judge import Comparison
from llorch.runtime.builtin import goldens_folder

HALF = "17"  # the checkpoint whose page shows runs in half precision, of all of them


def training_blocks(number: str, rows: Sequence[Comparison]) -> Blocks:
    """Make the generated blocks of one page, by name, from the rows of checkpoints 15 to 20."""
    mine = [row for row in rows if row.checkpoint == number]
    exact = [row for row in mine if row.mode == "exact"]
    blocks = {
        "stages": stages(number),
        "distances": distances([row for row in mine if row.mode != "exact"]),
        "mistakes": mistakes(number),
    }
    blocks |= {"equal": equal(exact)} if exact else {}
    return blocks | ({"half": half()} if number == HALF else {})


def stages(number: str) -> str:
    """List the rows of the table of training stages that belong to a checkpoint."""
    found = [stage for stage in TRAINING_STAGES if stage.checkpoint == number]
    columns = ("stage", "formula", "llorch's function", "where PEFT shows it")
    return table(columns, ([f"`{s.name}`", f"`{s.formula}`", link(s.function), s.peft] for s in found))


def distances(rows: Sequence[Comparison]) -> str:
    """List distances from float64 of the engines and of llorch in float64 and float32, with the tolerance of float32.

    One line per group of stages, mode and case: the largest number of all models, layers and tensors.
    """
    groups: dict[tuple[str, str, str], list[Comparison]] = {}
    for row in rows:
        groups.setdefault((row.place.stage, row.mode, row.case), []).append(row)
    places = list(BY_GROUP)
    ordered = sorted(groups, key=lambda k: (places.index(k[0]), MODES.index(k[1])))
    producers = [p for p in (LLAMACPP, TRANSFORMERS, PEFT) if any(row.producer == p for row in rows)]
    llorch = ("llorch float64", "llorch float32", "tolerance")
    columns = ("stage", "mode", "case", *(ENGINES[p] for p in producers), *llorch)
    lines = ([f"`{at[0]}`", *at[1:], *_largest(groups[at], producers)] for at in ordered)
    return f"Models: {', '.join(MODELS)}.\n\n{table(columns, lines, right=len(producers) + 3)}"


def half() -> str:
    """List PEFT's distance from float64 on a base in half precision, with the tolerance, for all checkpoints."""
    goldens = [read(goldens_folder() / model) for model in MODELS]
    columns = ["no", "stage", "mode"]
    for dtype in HALF_DTYPES:
        columns += [f"{dtype}: {ENGINES[PEFT]}", "tolerance"]
    judged = goldens[0].half_errors[HALF_DTYPES[0]]
    made = [(stage, mode) for stage in TRAINING_STAGES for mode in MODES if stage.name in judged.get(mode, {})]
    lines = ([s.checkpoint, f"`{s.name}`", mode, *_half_cells(goldens, mode, s.name)] for s, mode in made)
    return f"Models: {', '.join(MODELS)}.\n\n{table(columns, lines, right=len(columns) - 3)}"


def trainers() -> list[str]:
    """Name the engines that made the training goldens, a line for each."""
    found = []
    for model in MODELS:
        engines = read(goldens_folder() / model).provenance["engines"]
        assert isinstance(engines, Mapping)
        made = engines[PEFT]
        found.append(
            f"PEFT {made['peft']}: transformers {made['transformers']}, torch {made['torch']} (autograd, AdamW)"
        )
    return list(dict.fromkeys(found))


def _half_cells(goldens: Sequence[TrainingGolden], mode: str, name: str) -> Iterator[str]:
    for dtype in HALF_DTYPES:
        yield short(max(e for g in goldens for e in g.half_errors[dtype][mode][name].values()), 2)
        allowed = [g.tolerances[dtype][mode].get(name) for g in goldens]
        yield short(max(t.error for t in allowed if t), 2) if all(allowed) else "of float32"


def _largest(rows: Sequence[Comparison], producers: Sequence[str]) -> list[str]:
    cells = []
    for name in producers:
        found = [row.producer_error for row in rows if row.producer == name]
        cells.append(short(max(found), 2) if found else "-")
    wide = max((row.error for row in rows if row.producer == TRUTH), default=math.nan)
    narrow = [row for row in rows if row.producer != TRUTH]
    ours, allowed = max(row.truth_error for row in narrow), max(row.tolerance for row in narrow)
    return [*cells, roughly(wide), roughly(ours), short(allowed, 2)]
