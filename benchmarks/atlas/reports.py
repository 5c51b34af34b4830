"""A report for the maintainers of an engine: what it computes, what is expected, and a program that shows both."""

from collections.abc import Sequence

from benchmarks.atlas.catalogue import BY_NAME
from benchmarks.atlas.repro_scripts import ProgramOutput
from benchmarks.atlas.verdicts import EngineReport


def report(title: str, own: Sequence[EngineReport], shown: ProgramOutput | None) -> str:
    """Write one report of a bug, as Markdown.

    Args:
        title: Title of the bug.
        own: Its verdicts, on one input or more.
        shown: The program of the first of them.
    """
    first = own[0]
    assert first.run_report
    assert first.agreed
    said = [
        f"# {title}",
        f"{first.engine} {first.version}, from the package registry, {first.way or 'float32'} on a CPU.",
        f"The engine's logits differ from those of transformers on these models: "
        f"{', '.join(dict.fromkeys(f'`{r.input.name}` ({r.run_report.error:.0e})' for r in own if r.run_report))}. "
        "The number in brackets is |engine - transformers in float64| / |transformers in float64|.",
        f"First wrong stage: `{first.run_report.key}`. {' '.join(first.run_report.findings)}",
        f"With {first.correction} it agrees: {first.agreed.error:.0e}, which is rounding.",
    ]
    known = BY_NAME[first.engine].known if first.engine in BY_NAME else {}
    said += [note for words, note in known.items() if words in first.correction]
    if shown:
        said.append("Logits of the last token on both models, compared with transformers in float64:")
        said.append(f"```python\n{shown.program}```")
        said.append(f"It printed:\n\n```\n{shown.printed}\n```")
    said.append(f"`python -m benchmarks.atlas {first.engine}` makes these models and repeats the comparison.")
    return "\n\n".join(said) + "\n"
