"""The generated parts of the pages of checkpoints 15 to 20."""

import math
from collections.abc import Iterator, Mapping, Sequence

from checkpoints.generated.tables import ENGINE_LABELS, Blocks, equal, link, mistakes, roughly, short, table
from llorch.judging.expectations.training_refs import LLAMACPP, MODES, PEFT, TRANSFORMERS
from llorch.judging.goldens.training import HALF_DTYPES, MODELS, PEFT_FLOAT64, TrainingGolden, read
from llorch.judging.types import Comparison
from llorch.runtime.builtin import goldens_folder
from llorch.stages.training import BY_GROUP, TRAINING_STAGES

HALF = "17"  # the checkpoint whose page shows runs in half precision, of all of them


def training_blocks(number: str, comparisons: Sequence[Comparison]) -> Blocks:
    """Make the generated blocks of one page, by name, from the rows of checkpoints 15 to 20."""
    mine = [c for c in comparisons if c.stage_ref.checkpoint == number]
    exact = [c for c in mine if c.mode == "exact"]
    blocks = {
        "stages": stages(number),
        "distances": distances([c for c in mine if c.mode != "exact"]),
        "mistakes": mistakes(number),
    }
    blocks |= {"equal": equal(exact)} if exact else {}
    return blocks | ({"half": half()} if number == HALF else {})


def stages(number: str) -> str:
    """List the rows of the table of training stages that belong to a checkpoint."""
    rows = [stage for stage in TRAINING_STAGES if stage.checkpoint == number]
    columns = ("stage", "formula", "llorch's function", "where PEFT shows it")
    return table(columns, ([f"`{s.name}`", f"`{s.formula}`", link(s.function), s.peft] for s in rows))


def distances(comparisons: Sequence[Comparison]) -> str:
    """List distances from float64 of the engines and of llorch in float64 and float32, with the tolerance of float32.

    One line per group of stages, mode and case: the largest number of all models, layers and tensors.
    """
    groups: dict[tuple[str, str, str], list[Comparison]] = {}
    for comparison in comparisons:
        stage_ref = comparison.stage_ref
        groups.setdefault((stage_ref.stage, comparison.mode, stage_ref.run), []).append(comparison)
    places = list(BY_GROUP)
    ordered = sorted(groups, key=lambda k: (places.index(k[0]), MODES.index(k[1])))
    engines = [p for p in (LLAMACPP, TRANSFORMERS, PEFT) if any(c.engine == p for c in comparisons)]
    llorch = ("llorch float64", "llorch float32", "tolerance")
    columns = ("stage", "mode", "case", *(ENGINE_LABELS[p] for p in engines), *llorch)
    lines = ([f"`{group_key[0]}`", *group_key[1:], *_largest(groups[group_key], engines)] for group_key in ordered)
    return f"Models: {', '.join(MODELS)}.\n\n{table(columns, lines, right=len(engines) + 3)}"


def half() -> str:
    """List PEFT's distance from float64 on a base in half precision, with the tolerance, for all checkpoints."""
    goldens = [read(goldens_folder() / model) for model in MODELS]
    columns = ["no", "stage", "mode"]
    for dtype in HALF_DTYPES:
        columns += [f"{dtype}: {ENGINE_LABELS[PEFT]}", "tolerance"]
    half_errors = goldens[0].half_errors[HALF_DTYPES[0]]
    pairs = [(stage, mode) for stage in TRAINING_STAGES for mode in MODES if stage.name in half_errors.get(mode, {})]
    lines = ([s.checkpoint, f"`{s.name}`", mode, *_half_cells(goldens, mode, s.name)] for s, mode in pairs)
    return f"Models: {', '.join(MODELS)}.\n\n{table(columns, lines, right=len(columns) - 3)}"


def trainers() -> list[str]:
    """Name the engines that made the training goldens, a line for each."""
    lines = []
    for model in MODELS:
        engines = read(goldens_folder() / model).provenance["engines"]
        assert isinstance(engines, Mapping)
        peft = engines[PEFT]
        lines.append(
            f"PEFT {peft['peft']}: transformers {peft['transformers']}, torch {peft['torch']} (autograd, AdamW)"
        )
    return list(dict.fromkeys(lines))


def _half_cells(goldens: Sequence[TrainingGolden], mode: str, name: str) -> Iterator[str]:
    for dtype in HALF_DTYPES:
        yield short(max(e for g in goldens for e in g.half_errors[dtype][mode][name].values()), 2)
        allowed = [g.tolerances[dtype][mode].get(name) for g in goldens]
        yield short(max(t.error for t in allowed if t), 2) if all(allowed) else "of float32"


def _largest(comparisons: Sequence[Comparison], engines: Sequence[str]) -> list[str]:
    cells = []
    for name in engines:
        errors = [c.engine_error for c in comparisons if c.engine == name]
        cells.append(short(max(errors), 2) if errors else "-")
    f64 = max((c.difference.error for c in comparisons if c.engine == PEFT_FLOAT64), default=math.nan)
    narrow = [c for c in comparisons if c.engine != PEFT_FLOAT64]
    f32, allowed = max(c.reference_error for c in narrow), max(c.tolerance.error for c in narrow)
    return [*cells, roughly(f64), roughly(f32), short(allowed, 2)]
