"""The files of a filled table: a page, a picture, JSON, and a report for each bug."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.atlas.catalogue import BY_NAME
from benchmarks.atlas.page import bugs, picture, quantised_page, readme
from benchmarks.atlas.repro_scripts import ProgramOutput, shown
from benchmarks.atlas.runs import python_of
from benchmarks.atlas.verdicts import EngineReport
from llorch.files.new_file import new_file


def write_atlas(
    verdicts: Sequence[EngineReport], facts: Mapping[str, str], home: Path, folder: Path,
    to_json: Callable[[object], str], progress: Callable[[str], None],
) -> None:  # fmt: skip
    """Write all of them into a folder; reports of an earlier table go away.

    Args:
        verdicts: Verdicts of the whole table.
        facts: Place and time of the runs.
        home: Folder with the inputs and environments; the programs of reports run there.
        folder: Folder for the files.
        to_json: Writes the record.
        progress: Told what is being done.

    Raises:
        OSError: It cannot be written.
        MissingExtra: There is nothing to draw with.
    """
    drawn, found = picture(verdicts), dict(bugs(verdicts))
    names = {title: f"reports/{at:02}-{_slug(title.partition(';')[0])}.md" for at, title in enumerate(found, 1)}
    (folder / "reports").mkdir(parents=True, exist_ok=True)
    for old in (folder / "reports").glob("*.md"):
        old.unlink()
    texts: dict[str, str] = {}
    for title, own in found.items():
        progress(f"{names[title]}: its program")
        texts[names[title]] = report(title, own, _first_program(own, home))
    texts |= {"stages.svg": drawn, "README.md": readme(verdicts, facts, names)}
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


def _first_program(own: Sequence[EngineReport], home: Path) -> ProgramOutput | None:
    """Find the first program that shows the bug, among all inputs that have it; None if there is none."""
    engine = BY_NAME[own[0].engine]
    for each in own:
        assert each.confirmed_by
        if made := shown(each.input, each.confirmed_by, engine, python_of(engine, home), home):
            return made
    return None


def record(verdicts: Sequence[EngineReport], facts: Mapping[str, str]) -> dict[str, object]:
    """Collect the verdicts as plain values, for a program."""
    return {"version": 2, **facts, "verdicts": [each.record() for each in verdicts]}


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


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
