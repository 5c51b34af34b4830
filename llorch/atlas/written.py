"""The files of a filled table: a page, a picture, JSON, and a report for each bug."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llorch.atlas.catalogue import BY_NAME
from llorch.atlas.page import bugs, picture, readme
from llorch.atlas.reports import report
from llorch.atlas.verdicts import Verdict
from llorch.files.new_file import new_file


def write_atlas(
    verdicts: Sequence[Verdict], facts: Mapping[str, str], home: Path, folder: Path, to_json: Callable[[object], str]
) -> None:
    """Write all of them into a folder; reports of an earlier table go away.

    Raises:
        OSError: It cannot be written.
        MissingExtra: There is nothing to draw with.
    """
    drawn, found = picture(verdicts), dict(bugs(verdicts))
    names = {title: f"reports/{at:02}-{_slug(title.partition(';')[0])}.md" for at, title in enumerate(found, 1)}
    (folder / "reports").mkdir(parents=True, exist_ok=True)
    for old in (folder / "reports").glob("*.md"):
        old.unlink()
    texts = {names[title]: report(title, own, BY_NAME[own[0].engine], home) for title, own in found.items()}
    texts |= {"stages.svg": drawn, "README.md": readme(verdicts, facts, names)}
    texts |= {"atlas.json": to_json(record(verdicts, facts)) + "\n"}
    for name, text in texts.items():
        with new_file(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


def record(verdicts: Sequence[Verdict], facts: Mapping[str, str]) -> dict[str, object]:
    """For a program."""
    return {"version": 1, **facts, "verdicts": [each.record() for each in verdicts]}


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
