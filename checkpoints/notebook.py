"""A lesson as a notebook: its cells without output, with the figures inside the file."""

import base64
import re
from pathlib import Path

import jupytext
from nbformat import NotebookNode

FIGURE = re.compile(r"!\[(?P<alt>[^]]*)\]\((?P<path>[^)]+\.svg)\)")
FORMULA = re.compile(r"^```math\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RELATIVE_LINK = re.compile(r"(?<!!)\[(?P<text>[^]]*)\]\((?!https?:|attachment:)[^)]+\)")


def notebook(lesson: Path) -> str:
    """Convert a lesson.

    Args:
        lesson: A file in percent format.

    Returns:
        The notebook as JSON. Links to other pages become plain text, because the file is used without them.
    """
    cells = jupytext.read(lesson, fmt="py:percent")
    for cell in cells.cells:
        if cell.cell_type == "markdown":
            _embed_figures(cell, lesson.parent)
            cell.source = RELATIVE_LINK.sub(lambda match: match["text"], cell.source)
            cell.source = FORMULA.sub(lambda match: f"$$\n{match[1]}$$", cell.source)
    cells.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return jupytext.writes(cells, fmt="ipynb")


def _embed_figures(cell: NotebookNode, folder: Path) -> None:
    def attach(match: re.Match[str]) -> str:
        name = Path(match["path"]).name
        encoded = base64.b64encode((folder / match["path"]).read_bytes()).decode()
        cell.setdefault("attachments", {})[name] = {"image/svg+xml": encoded}
        return f"![{match['alt']}](attachment:{name})"

    cell.source = FIGURE.sub(attach, cell.source)
