"""The generated parts of a checkpoint page: Markdown from the stage table, the goldens and the known mistakes.

Distances of the engines follow from stored files, so they are the same on every machine. The error of llorch's float32
run depends a little on the machine's BLAS, and so do derived limits; such numbers are marked with `~`, see `pages`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from llorch.diagnosis.mistakes import MISTAKES, checkpoint_of, of_checkpoint
from llorch.judging.goldens.float64_reference import FLOAT64_REFERENCE
from llorch.judging.goldens.forward import ENGINES, SAMPLINGS, Golden
from llorch.judging.goldens.quantised import FOLDER as QUANTISED
from llorch.judging.goldens.training import PEFT_FLOAT64
from llorch.judging.types import Comparison
from llorch.runtime.builtin import EVERY, goldens_folder
from llorch.stages.comparison import PASS, TIE
from llorch.stages.table import BY_NAME, STAGES, Stage

ENGINE_LABELS = {
    "llamacpp": "llama.cpp", "transformers": "transformers", "reader": "gguf package", "peft": "PEFT",
    "ours": "llorch's file, loaded by llama.cpp", FLOAT64_REFERENCE: "transformers in float64",
    PEFT_FLOAT64: "PEFT in float64",
}  # fmt: skip
MODES = ("isolated", "chained", "decode")
PACKAGE = Path(__file__).resolve().parents[2] / "llorch"

Blocks = Mapping[str, str]  # name of a generated part -> its Markdown


def page_blocks(number: str, comparisons: Sequence[Comparison]) -> Blocks:
    """Make the generated blocks of one checkpoint's page.

    Args:
        number: The checkpoint.
        comparisons: Comparisons of all checkpoints and models.

    Returns:
        Name to Markdown, only the parts that this checkpoint has.
    """
    mine = [c for c in comparisons if c.stage_ref.checkpoint == number]
    measured = [c for c in mine if c.mode != "exact"]
    exact = [c for c in mine if c.mode == "exact"]
    in_table = [stage for stage in STAGES if stage.checkpoint == number]
    blocks = {"mistakes": mistakes(number)}
    if in_table:
        blocks["stages"] = stages(in_table)
    if measured:
        blocks["distances"] = distances(measured)
    if exact:
        blocks["equal"] = equal(exact)
    if number == "11":
        blocks["settings"] = settings()
    return blocks


def stages(rows: Sequence[Stage]) -> str:
    """List the rows of the stage table of one checkpoint."""
    columns = ("stage", "shape", "formula", "llorch's function", "llama.cpp node", "transformers hook")
    return table(
        columns,
        ([_stage_name(s), _shape(s), f"`{s.formula}`", link(s.function), s.llamacpp, s.transformers] for s in rows),
    )


def distances(comparisons: Sequence[Comparison]) -> str:
    """List distances from float64 of the engines and of llorch in float64 and float32, with the tolerance of float32.

    Args:
        comparisons: Measured rows of one checkpoint, any number of models and layers.

    Returns:
        One line per stage, mode and case: the largest number of all models and layers.
    """
    groups: dict[tuple[str, str, str], list[Comparison]] = {}
    for comparison in comparisons:
        stage_ref = comparison.stage_ref
        groups.setdefault((stage_ref.name, comparison.mode, stage_ref.case), []).append(comparison)
    ordered = sorted(groups, key=lambda k: (_place(k[0]), MODES.index(k[1]), k[2] != "near"))
    llorch = ("llorch float64", "llorch float32", "tolerance")
    columns = ("stage", "mode", "case", *(ENGINE_LABELS[p] for p in ENGINES), *llorch)
    lines = ([f"`{stage}`", mode, case, *_largest(groups[stage, mode, case])] for stage, mode, case in ordered)
    return f"{_models(comparisons)}.\n\n{table(columns, lines, right=5)}"


def equal(comparisons: Sequence[Comparison]) -> str:
    """Count the models in which everything that must be equal is equal."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault((comparison.stage_ref.name, comparison.engine), []).append(comparison)
    lines = ([f"`{stage}`", ENGINE_LABELS[engine], _verdicts(group)] for (stage, engine), group in groups.items())
    return f"{_models(comparisons)}.\n\n{table(('compared', 'with', 'equal'), lines)}"


def settings() -> str:
    """List the sampler settings whose distributions are compared."""
    columns = [name for name in asdict(SAMPLINGS["all"]) if name != "seed"]
    lines = ([f"`{name}`", *(f"{asdict(s)[column]:g}" for column in columns)] for name, s in SAMPLINGS.items())
    return table(("name", *(f"`{column}`" for column in columns)), lines)


def mistakes(number: str) -> str:
    """List known mistakes of one checkpoint: the name of each, and the diagnosis when it is recognised."""
    lines = []
    for mistake in (MISTAKES[name] for name in of_checkpoint(number)):
        stage_names = [stage for stage in mistake.stages if checkpoint_of(stage) == number]
        lines.append([f"`{mistake.name}`", ", ".join(f"`{stage}`" for stage in stage_names), mistake.diagnosis])
    return table(("mistake", "at", "diagnosis"), lines)


def index_blocks(
    comparisons: Sequence[Comparison], goldens: Mapping[str, Golden], names: Mapping[str, str], trainers: Iterable[str]
) -> Blocks:
    """Make the generated blocks of the index for people who port a model.

    Args:
        comparisons: Comparisons of all checkpoints and models.
        goldens: Model to goldens.
        names: Checkpoint number to name.
        trainers: Engines that made the training goldens, a line each.

    Returns:
        Name to Markdown.
    """
    engines = {line for name, golden in goldens.items() for line in _engines_of(name, golden)}
    lines = (
        [
            number,
            f"[{name}]({number}_{name}/PORTING.md)",
            _compared(number, comparisons),
            str(len(of_checkpoint(number)) or ""),
        ]
        for number, name in names.items()
    )
    return {
        "checkpoints": table(("no", "page", "compared", "mistakes"), lines),
        "witnesses": "\n".join(f"- {line}" for line in sorted({*engines, *trainers})),
        "routes": table(("model", "reference engine", "load path of its file"), routes(comparisons)),
    }


def routes(comparisons: Sequence[Comparison]) -> Iterator[Sequence[str]]:
    """List the load paths by which files came into the engines."""
    models: dict[tuple[str, str], dict[str, None]] = {}
    for comparison in comparisons:
        if comparison.load_path is not None:
            name = QUANTISED if comparison.stage_ref.checkpoint == "13" else comparison.model
            models.setdefault((ENGINE_LABELS.get(comparison.engine, comparison.engine), str(comparison.load_path)), {})[
                name
            ] = None
    return ([", ".join(names), engine, route] for (engine, route), names in sorted(models.items()))


def models_with_goldens() -> list[str]:
    """List the built-in models that have stored goldens."""
    return [name for name in EVERY if (goldens_folder() / name / "golden.json").is_file()]


def table(columns: Sequence[str], lines: Iterable[Sequence[str]], *, right: int = 0) -> str:
    """Write a Markdown table; the last `right` columns are aligned to the right."""
    rules = [*["---"] * (len(columns) - right), *["---:"] * right]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, rules, *cells))


def short(value: float, digits: int) -> str:
    """Write a distance with some digits."""
    return f"{value:.{digits - 1}e}" if value else "0"


def _stage_name(stage: Stage) -> str:
    return f"`{stage.name}`" + (" (families with q/k norm)" if stage.needs == ("qk_norm",) else "")


def _shape(stage: Stage) -> str:
    return f"({', '.join(stage.axes.split())})"


def link(function: str) -> str:
    """Link from a page to the file of `llorch.ops.rope.rope`, or of `llorch.model.cache.KVCache.append`."""
    file, names = PACKAGE, function.split(".")[1:]
    while not file.with_suffix(".py").is_file() and len(names) > 1:
        file /= names.pop(0)
    file = file.with_suffix(".py") if file.with_suffix(".py").is_file() else file / "__init__.py"
    return f"[`{'.'.join(names)}`](../../llorch/{file.relative_to(PACKAGE).as_posix()})"


def _largest(comparisons: Sequence[Comparison]) -> list[str]:
    engines = [max(c.engine_error for c in comparisons if c.engine == engine) for engine in ENGINES]
    f64 = max((c.difference.error for c in comparisons if c.engine == FLOAT64_REFERENCE), default=math.nan)
    f32 = max(c.reference_error for c in comparisons if c.engine != FLOAT64_REFERENCE)  # NaN of all isolated rows
    allowed = max(c.tolerance.error for c in comparisons)
    return [*(short(distance, 2) for distance in engines), *(roughly(n) for n in (f64, f32)), f"~{short(allowed, 2)}"]


def roughly(distance: float) -> str:
    """Write a distance of llorch, which depends a little on the machine, with `~`."""
    return "" if math.isnan(distance) else f"~{short(distance, 1)}"


def _verdicts(comparisons: Sequence[Comparison]) -> str:
    ties = sum(c.verdict == TIE for c in comparisons)
    passed = f"{sum(c.verdict == PASS for c in comparisons)} of {len(comparisons)}"
    return passed + (f", {ties} part at a near-tie" if ties else "")


def _models(comparisons: Sequence[Comparison]) -> str:
    return "Models: " + ", ".join(dict.fromkeys(c.model for c in comparisons))


def _place(stage: str) -> int:
    """Return the position in the stage table; stages that it lacks keep the order of the rows."""
    return list(BY_NAME).index(stage) if stage in BY_NAME else -1


def _compared(number: str, comparisons: Sequence[Comparison]) -> str:
    mine = [c for c in comparisons if c.stage_ref.checkpoint == number]
    stage_names = dict.fromkeys(c.stage_ref.stage for c in mine if c.mode != "decode")
    text = ", ".join(f"`{stage}`" for stage in sorted(stage_names, key=_place)) or "01 to 12 again, in every dtype"
    return text + ("; every stage again, in two passes" if number == "03" else "")


def _engines_of(model: str, golden: Golden) -> Iterator[str]:
    engines, machine = golden.provenance["engines"], golden.provenance["machine"]
    assert isinstance(engines, Mapping)
    for name, reason in golden.unsupported_reason.items():
        yield f"{ENGINE_LABELS[name]} is no reference engine for {model}: {reason}"
    if ggml := engines.get("llamacpp"):
        versions = f"llama-cpp-python {ggml['llama_cpp_python']}, ggml {ggml['ggml']}"
        yield f"llama.cpp: {versions}, {machine}: {ggml['system']}"
    if torch := engines.get("transformers"):
        yield f"transformers {torch['transformers']}: torch {torch['torch']}, {machine}, {torch['cpu_capability']}"
