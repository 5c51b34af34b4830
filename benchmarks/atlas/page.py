"""Pages of the atlas: tables of engines and inputs, the bugs, and a picture of every stage."""

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle, groupby, product

from benchmarks.atlas.inputs import AtlasInput
from benchmarks.atlas.verdicts import CAUSE_CONFIRMED, ROUNDING, UNREADABLE, EngineReport
from llorch.runtime.errors import MissingExtra
from llorch.stages.comparison import FAIL, NOT_RUN, PASS
from llorch.stages.table import BY_NAME

LABELS = (PASS, ROUNDING, CAUSE_CONFIRMED, FAIL, "refused", "crashed", "hung", "too large", UNREADABLE)
_QUOTED = ("refused", "crashed")  # their messages are quoted from the engines
_LARGEST = "largest distance of a PASS"
_LEGEND = """\
Every engine ran unmodified, with its own loader, in a separate environment. A number is the distance of the engine's
logits from the float64 reference, |engine - reference| / |reference|. The float64 reference is transformers in float64.

- **PASS**: every stage that the engine shows is within the tolerance of the engine's arithmetic (tolerances:
  `llorch/judging/tolerances/forward.py`).
- **ROUNDING**: a stage differs by more than float32 explains, but [the engine's
  arithmetic](../../../checkpoints/honest_differences.md) explains it. The end of the page names this arithmetic.
- **FAIL, cause confirmed**: the difference is larger, and one named correction from outside made the engine right.
- **FAIL**: the difference is larger, and no known correction makes the engine agree.
- **refused**: the engine reports that it does not support this model.
- **crashed**: the engine raised another error, or its process ended.
- **unreadable**: the adapter wrote data that do not fit their description.

The top of each adapter in `benchmarks/atlas/engines/` says what the adapter changes. A mistake of the adapter may cause
a **FAIL**. Three causes have no correction by an input. They were found in the source of keras-hub and shown by a run:
[weights of Mistral in float16](reports/by_cause/keras-hub-mistral-weights-in-float16.md),
[an eps of Qwen3](reports/by_cause/keras-hub-qwen3-layer-norm-epsilon.md) and
[the output matrix of SmolLM3](reports/by_cause/keras-hub-smollm3-lm-head-not-loaded.md). The file
`benchmarks/atlas/inputs.py` explains the styles of configurations and the changes of each feature.
"""


def readme(verdicts: Sequence[EngineReport], facts: Mapping[str, str], reports: Mapping[str, str]) -> str:
    """Render the page: `facts` are machine, date and versions, `reports` map titles of bugs to file names."""
    ran = [v for v in verdicts if v.verdict != NOT_RUN]
    parts = [
        "# Atlas: popular engines, judged stage by stage",
        "Made by `python -m benchmarks.atlas`: " + ", ".join(f"{name} {value}" for name, value in facts.items()) + ".",
        _LEGEND,
        engines_table(ran),
        *(f"NOT RUN: {v.engine}: {v.message}." for v in verdicts if v.verdict == NOT_RUN),
        "![The distance of every stage from the float64 reference](stages.svg)",
        "## Bugs\n\n" + (bugs_table(ran, reports) or "No bug was confirmed."),
        "## Hugging Face folders\n\n" + inputs_table([v for v in ran if not v.input.gguf]),
        "## GGUF files\n\n" + inputs_table([v for v in ran if v.input.gguf]),
        "## Messages and causes\n\n" + "\n".join(_message_lines(ran)),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


_QUANTISED = """\
Small folders of [`reference_outputs/quantised_folders`](../../../../reference_outputs/quantised_folders/README.md), one
of each format. transformers and mlx-lm read the folders by their own loaders. llama.cpp reads the GGUF files that
`llorch convert` makes of them. A number is the distance of the engine's logits from the float64 reference. The
reference is transformers in float64 on the weights that llorch decoded. Goldens of other libraries check these weights,
bit by bit.

- **PASS**: every stage is within the tolerance of float32.
- **ROUNDING**: the engine rounds more than float32 does, and the end of the page names the rounding.
- **FAIL**: more than rounding. The end of the page names the first stage and, if it is known, the mistake.
- **refused**, **crashed**: the message of the engine is at the end of the page.

transformers ran with compressed-tensors and bitsandbytes, without the packages that it wants for the other methods.
gptqmodel 7.7.0 installs only with `pip install --no-deps`, because it asks for torch with CUDA. With it, transformers
loads a GPTQ folder on a CPU, but gave no logits within 120 s: NOT RUN."""
_IN_SOURCES = """\
Causes that were found in the source of the engines:

- transformers, `fp8-*`: it dequantises to bfloat16, the dtype of config.json, whatever dtype the caller asks for.
- transformers, `fp8-block-partial`: it divides the shape by the number of scales to get the size of a block.
- transformers, `ct-w4a16-asym`: compressed-tensors expects unpacked zero points, which it never writes.
- transformers, `ct-nvfp4`, `ct-mxfp4`, `ct-mxfp8`: compressed-tensors decompresses to bfloat16.
- transformers, `bnb-nf4`: the CPU code of bitsandbytes takes only rows whose length 64 divides.
- transformers, `modelopt-nvfp4`: the method is unknown to it, so it loads the tensors as if they were floats.
- mlx-lm, `gptq-*`: it reads tensors of GPTQ in the layout of AWQ (`_transform_awq_weights`), which fits no such matrix.
- mlx-lm, `awq-gemm`: it keeps the product of zero point and scale in float16. The weights with that rounding give the
  same distance, 4.5e-05."""


def quantised_page(verdicts: Sequence[EngineReport], facts: Mapping[str, str]) -> str:
    """Render the page of quantised folders; `facts` are machine, date and versions."""
    ran = [v for v in verdicts if v.verdict != NOT_RUN]
    parts = [
        "# Atlas: quantised Hugging Face folders",
        "Made by `python -m benchmarks.atlas transformers llama.cpp mlx-lm --input quantised "
        "--output benchmarks/atlas/results/quantised`: "
        + ", ".join(f"{name} {value}" for name, value in facts.items()) + ".",
        _QUANTISED,
        engines_table(ran),
        *(f"NOT RUN: {v.engine}: {v.message}." for v in verdicts if v.verdict == NOT_RUN),
        "## Folders\n\n" + inputs_table([v for v in ran if not v.input.gguf]),
        "## GGUF files made of them\n\n" + inputs_table([v for v in ran if v.input.gguf]),
        "## Messages and causes\n\n" + _IN_SOURCES + "\n\nMessages and diagnoses:\n\n" + "\n".join(_message_lines(ran)),
    ]  # fmt: skip
    return "\n\n".join(part.strip() for part in parts) + "\n"


def engines_table(verdicts: Sequence[EngineReport]) -> str:
    """Count the inputs of each engine by verdict, as a table."""
    rows = []
    for name, group in _by_engine(verdicts):
        count = Counter(v.label for v in group)
        version = next((v.version for v in group if v.version), "")
        errors = [v.run_report.error for v in group if v.run_report and v.verdict == PASS]
        largest = f"{max(errors):.0e}" if errors else ""
        rows.append([name, version, *(str(count[label] or "") for label in LABELS), largest])
    return _markdown_table(["engine", "version", *LABELS, _LARGEST], rows)


def inputs_table(verdicts: Sequence[EngineReport]) -> str:
    """Render a table with a row for each input and a column for each engine."""
    engines = [name for name, _ in _by_engine(verdicts)]
    cells = {(_name(v), v.input): v for v in verdicts}
    rows = [
        [f"`{case.name}`", *(_cell(cells.get((engine, case))) for engine in engines)]
        for case in dict.fromkeys(v.input for v in verdicts)
    ]
    return _markdown_table(["input", *engines], rows)


def _cell(verdict: EngineReport | None) -> str:
    """Format the table cell of a report: the error alone for a PASS, else its label and any error."""
    if verdict is None:
        return ""
    size = f"{verdict.run_report.error:.0e}" if verdict.run_report else ""
    return size if verdict.verdict == PASS else f"**{verdict.label}** {size}" if size else verdict.label


def bugs_table(verdicts: Sequence[EngineReport], reports: Mapping[str, str]) -> str:
    """Render a table of confirmed bugs: engine, inputs, stage, mistake, distance, and the correction."""
    rows = []
    for title, group in bugs(verdicts):
        first = group[0]
        assert first.run_report
        assert first.agreed
        inputs = ", ".join(dict.fromkeys(f"`{v.input.name}`" for v in group))
        rows.append([
            f"[{first.engine} {first.version}]({reports[title]})", inputs, first.run_report.key,
            first.run_report.mistake or "not in the catalogue",
            f"{max(v.run_report.error for v in group if v.run_report):.0e}",
            f"{first.correction}: {first.agreed.error:.0e}",
        ])  # fmt: skip
    return (
        _markdown_table(["engine", "inputs", "first wrong stage", "mistake", "distance", "correction"], rows)
        if rows
        else ""
    )


def bugs(verdicts: Iterable[EngineReport]) -> Iterator[tuple[str, list[EngineReport]]]:
    """Group reports with a confirmed cause by option set, mistake and correction, under a title.

    A bug that shows with default options is not repeated for other option sets.
    """

    def title(verdict: EngineReport) -> str:
        mistake = verdict.run_report.mistake if verdict.run_report else ""
        symptom = mistake or f"{verdict.input.feature or verdict.input.family} wrong"
        return f"{_name(verdict)}: {symptom}; right with {verdict.correction}"

    reports = [v for v in verdicts if v.cause_confirmed]
    with_defaults = {(v.engine, v.input) for v in reports if not v.way}
    selected = sorted((v for v in reports if not v.way or (v.engine, v.input) not in with_defaults), key=title)
    return ((name, list(group)) for name, group in groupby(selected, key=title))


def _message_lines(verdicts: Sequence[EngineReport]) -> Iterator[str]:
    """Yield the messages of engines, and the known causes of results that are not a PASS, once each."""
    inputs_by_message: dict[tuple[str, str, str], list[AtlasInput]] = {}
    for v in verdicts:
        if v.message:
            inputs_by_message.setdefault((_name(v), v.label, v.message), []).append(v.input)
    for (name, label, text), inputs in inputs_by_message.items():
        names = ", ".join(f"`{i.name}`" for i in inputs[:4]) + (
            f" and {len(inputs) - 4} more" if len(inputs) > 4 else ""
        )
        yield f"- {name}, {label}: {names}: {_quoted(text) if label in _QUOTED else ' '.join(text.split())}"


def _quoted(text: str) -> str:
    """Format a message of an engine as a code span."""
    text = " ".join(text.split())
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def picture(verdicts: Sequence[EngineReport]) -> str:
    """Draw the largest distance of every stage over all inputs on which an engine is right, as an SVG.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("train", "matplotlib") from None
    stages = {stage for v in verdicts if v.run_report for stage in v.run_report.errors}
    names = [name for name in BY_NAME if name in stages]
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots()
    marks = cycle(product("os^vD", [f"C{colour}" for colour in range(7)]))
    for name, largest in _largest(verdicts):
        xs, (mark, colour) = [names.index(stage) for stage in largest], next(marks)
        axes.plot(xs, [*largest.values()], marker=mark, color=colour, ms=4, lw=0.6, label=name)
    axes.set(yscale="log", ylabel="largest distance from the float64 reference", xticks=range(len(names)))
    axes.set_xticklabels(names, rotation=90)
    figure.legend(fontsize="small", loc="outside right upper")
    with rc_context({"svg.hashsalt": "llorch"}):
        FigureCanvasSVG(figure).print_svg(svg := io.StringIO(), metadata={"Date": None})
    return svg.getvalue()


def _largest(verdicts: Sequence[EngineReport]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the largest distance of each stage, for engines that are right on some input, in table order."""
    for name, group in _by_engine(verdicts):
        passing = [v.run_report for v in group if v.run_report and v.verdict in (PASS, ROUNDING)]
        largest = {stage: max((run.errors.get(stage, 0.0) for run in passing), default=0.0) for stage in BY_NAME}
        if passing:
            yield name, {stage: error for stage, error in largest.items() if error > 0}


def _name(verdict: EngineReport) -> str:
    """Return the engine's name, followed by its option set if one is named."""
    return f"{verdict.engine}, {verdict.way}" if verdict.way else verdict.engine


def _by_engine(verdicts: Iterable[EngineReport]) -> list[tuple[str, list[EngineReport]]]:
    """Group reports by engine and option set, in order of first appearance."""
    groups: dict[str, list[EngineReport]] = {}
    for v in verdicts:
        groups.setdefault(_name(v), []).append(v)
    return list(groups.items())


def _markdown_table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
