"""Files of a filled table: a page, a picture, JSON, and a report for each bug."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.atlas.catalogue import BY_NAME
from benchmarks.atlas.page import bugs, picture, quantised_page, readme
from benchmarks.atlas.repro_scripts import ProgramOutput, run_repro_script
from benchmarks.atlas.runs import python_of
from benchmarks.atlas.verdicts import EngineReport
from llorch.files.new_file import new_file


def write_atlas(
    verdicts: Sequence[EngineReport], facts: Mapping[str, str], home: Path, folder: Path,
    to_json: Callable[[object], str], progress: Callable[[str], None],
) -> None:  # fmt: skip
    """Write all files into a folder; delete reports of an earlier table.

    Args:
        verdicts: Verdicts of the whole table.
        facts: Place and time of the runs.
        home: Folder with the inputs and environments; the programs of reports run there.
        folder: Folder for the files.
        to_json: Writes the record.
        progress: Called with a line about each step.

    Raises:
        OSError: It cannot be written.
        MissingExtra: There is nothing to draw with.
    """
    svg, bug_groups = picture(verdicts), dict(bugs(verdicts))
    names = {title: f"reports/{n:02}-{_slug(title.partition(';')[0])}.md" for n, title in enumerate(bug_groups, 1)}
    (folder / "reports").mkdir(parents=True, exist_ok=True)
    for old_report in (folder / "reports").glob("*.md"):
        old_report.unlink()
    texts: dict[str, str] = {}
    for title, group in bug_groups.items():
        progress(f"{names[title]}: its program")
        texts[names[title]] = report(title, group, _first_program(group, home))
    texts |= {"stages.svg": svg, "README.md": readme(verdicts, facts, names)}
    texts |= {"atlas.json": to_json(record(verdicts, facts)) + "\n"}
    for name, text in texts.items():
        with new_file(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


def write_quantised(
    verdicts: Sequence[EngineReport], facts: Mapping[str, str], folder: Path, to_json: Callable[[object], str]
) -> None:
    """Write page and JSON of the quantised folders; OSError if they cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"README.md": quantised_page(verdicts, facts), "atlas.json": to_json(record(verdicts, facts)) + "\n"}
    for name, text in texts.items():
        with new_file(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _first_program(group: Sequence[EngineReport], home: Path) -> ProgramOutput | None:
    """Find the first program that shows the bug, among all inputs with the bug; None if there is none."""
    engine = BY_NAME[group[0].engine]
    for v in group:
        assert v.confirmed_by
        if output := run_repro_script(v.input, v.confirmed_by, engine, python_of(engine, home), home):
            return output
    return None


def record(verdicts: Sequence[EngineReport], facts: Mapping[str, str]) -> dict[str, object]:
    """Collect the reports as plain values for JSON."""
    return {"version": 2, **facts, "verdicts": [v.record() for v in verdicts]}


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def report(title: str, group: Sequence[EngineReport], program: ProgramOutput | None) -> str:
    """Write one report of a bug, as Markdown.

    Args:
        title: Title of the bug.
        group: Engine reports with the bug, for one or more inputs.
        program: Program that shows the bug, if there is one.
    """
    first = group[0]
    assert first.run_report
    assert first.agreed
    sections = [
        f"# {title}",
        f"{first.engine} {first.version}, from the package registry, {first.way or 'float32'} on a CPU.",
        f"The engine's logits differ from those of transformers on these models: "
        f"{', '.join(dict.fromkeys(f'`{r.input.name}` ({r.run_report.error:.0e})' for r in group if r.run_report))}. "
        "The number in brackets is |engine - transformers in float64| / |transformers in float64|.",
        f"First wrong stage: `{first.run_report.key}`. {' '.join(first.run_report.findings)}",
        f"With {first.correction} it agrees: {first.agreed.error:.0e}, which is rounding.",
    ]
    known_bugs = BY_NAME[first.engine].upstream if first.engine in BY_NAME else {}
    sections += [note for words, note in known_bugs.items() if words in first.correction]
    if program:
        sections.append("Logits of the last token on both models, compared with transformers in float64:")
        sections.append(f"```python\n{program.program}```")
        sections.append(f"It printed:\n\n```\n{program.printed}\n```")
    sections.append(f"`python -m benchmarks.atlas {first.engine}` makes these models and repeats the comparison.")
    return "\n\n".join(sections) + "\n"
