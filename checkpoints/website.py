"""The web site: the pages as GitHub shows them, a reference, and a page for every linked file.

Each lesson's page links to the lesson as a notebook. The site loads nothing from other servers.
"""

import posixpath
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from sphinx.application import Sphinx

from checkpoints.generated.lessons import lesson_pages
from checkpoints.notebook import notebook
from checkpoints.reference import commands, functions, museum, names
from llorch.apps.learn.lessons import BLOCKS

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#\s]+)(?=[)#])")
LESSONS = {title: [f"checkpoints/{page}" for page in lesson_pages(lessons)] for title, lessons in BLOCKS.items()}
LESSON_PAGES = [page for pages in LESSONS.values() for page in pages]
PORTING = "checkpoints/PORTING.md"
PORTING_PAGES = [page.replace("README.md", "PORTING.md") for page in sorted(LESSON_PAGES)]
MUSEUM = "reference/museum.md"
REFERENCE = {"reference/commands.md": commands, "reference/python.md": names, "reference/ops.md": functions}
COMMAND_PAGES = sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "checkpoints/commands").glob("*.md"))
HOW_TO = sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "checkpoints/how_to").glob("*.md"))
MESH = "checkpoints/mesh/README.md"
GUIDE = [
    f"checkpoints/guide/{name}.md"
    for name in (
        "verify", "diagnosis", "learning", "fine_tuning", "serving",
        "families", "files", "quantised", "torch", "cuda", "machine",
    )
]  # fmt: skip
MORE = [
    MESH,
    "benchmarks/atlas/README.md",
    "benchmarks/atlas/results/README.md",
    "benchmarks/atlas/results/quantised/README.md",
    "checkpoints/honest_differences.md",
    "benchmarks/README.md",
    "benchmarks/by_hand.md",
    "CONTRIBUTING.md",
    "ARCHITECTURE.md",
    *HOW_TO,
    "tests/README.md",
    "CHANGELOG.md",
]
CONTENTS = {
    "Guide": GUIDE,
    "Learn": ["checkpoints/README.md"],
    **LESSONS,
    "Museum": [MUSEUM],
    "For porters": [PORTING],
    "Commands": COMMAND_PAGES,
    "Reference": list(REFERENCE),
    "More": MORE,
}
PAGES = {"README.md", *(page for pages in CONTENTS.values() for page in pages), *PORTING_PAGES}
MADE = REFERENCE | {MUSEUM: museum}
PICTURES = (".svg", ".png")
LANGUAGES = {".py": "python", ".c": "c", ".h": "c", ".cpp": "cpp", ".rs": "rust", ".toml": "toml", ".json": "json"}


def build_site(out: Path) -> None:
    """Build the site.

    Args:
        out: Folder of the site.

    Raises:
        click.ClickException: Sphinx printed a warning.
    """
    with TemporaryDirectory() as work:
        source = Path(work, "source")
        Staging(source).stage()
        app = Sphinx(source, ROOT / "checkpoints", out, Path(work, "doctrees"), "html", status=None)
        app.connect("html-page-context", OneTree(), priority=0)  # before the theme makes it
        app.build(force_all=True)
    if app.statuscode or app._warncount:
        raise click.ClickException(f"site: expected no warnings of Sphinx, got {app._warncount}; see the lines above")


class OneTree:
    """Navigation in the margin, made once for many pages; otherwise it takes 40 % of the time to build the site.

    The pages of source files are not in the navigation. So it is the same on all of them, but for its links, which
    depend on the depth of the folder.
    """

    def __init__(self) -> None:
        """Start with no navigation."""
        self._trees: dict[tuple[int, str], str] = {}

    def __call__(self, app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object) -> None:
        """Replace the navigation in a page's context; Sphinx calls this for each page."""
        make = context["toctree"]

        def cached_tree(**options: object) -> str:
            key = page.count("/"), repr(sorted(options.items()))
            if key not in self._trees:
                self._trees[key] = make(**options)
            return self._trees[key]

        if page.startswith("source/"):
            context["toctree"] = cached_tree


class Staging:
    """The files that Sphinx reads, in the same places as in the repository."""

    def __init__(self, folder: Path) -> None:
        """Prepare to write into a folder."""
        self.folder = folder

    def stage(self) -> None:
        """Write all pages."""
        appendices = {"README.md": "".join(_toctree(*item) for item in CONTENTS.items())}
        appendices[PORTING] = _toctree(None, [posixpath.relpath(page, "checkpoints") for page in PORTING_PAGES])
        for path in PAGES - MADE.keys():
            self._write(_place(path), self._linked(self._text(path), path) + appendices.get(path, ""))
        for path, make_page in MADE.items():
            self._write(path, self._linked(make_page(), path))

    def _text(self, path: str) -> str:
        """Read a page; a lesson's gets a link to its notebook, which is written next to it."""
        text = (ROOT / path).read_text(encoding="utf-8")
        if path not in LESSON_PAGES:
            return text
        folder = posixpath.dirname(path)
        name = f"{posixpath.basename(folder)}.ipynb"
        self._write(f"{folder}/{name}", notebook(ROOT / folder / "lesson.py"))
        title, rest = text.split("\n\n", 1)
        return f"{title}\n\n{{download}}`Download this lesson as a notebook <{name}>`\n\n{rest}"

    def _linked(self, text: str, path: str) -> str:
        """Replace links to files of the repository by links to their pages on the site."""

        def link(match: re.Match[str]) -> str:
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match["path"]))
            return f"]({posixpath.relpath(self._site_page(target), posixpath.dirname(path) or '.')}"

        return LINK.sub(link, text)

    def _site_page(self, path: str) -> str:
        """Return the page of a file or folder, and write it if it is missing.

        The site's search leaves these pages out, because the reference has the public names that they define.
        """
        if path in PAGES:
            return _place(path)
        file = ROOT / path
        if file.suffix in PICTURES:
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, self.folder / path)
            return path
        place = f"source/{path}/index.md" if file.is_dir() else f"source/{path}.md"
        if not (self.folder / place).exists():
            self._write(place, "")  # files may lead to each other
            body = self._listing(file, place) if file.is_dir() else _fenced(file)
            self._write(place, f"---\norphan: true\nnosearch: true\n---\n# {path}\n\n{body}\n")
        return place

    def _listing(self, folder: Path, place: str) -> str:
        files = sorted(file.relative_to(ROOT).as_posix() for file in folder.iterdir() if file.suffix in LANGUAGES)
        return "\n".join(
            f"- [{posixpath.basename(file)}]({posixpath.relpath(self._site_page(file), posixpath.dirname(place))})"
            for file in files
        )

    def _write(self, place: str, text: str) -> None:
        (self.folder / place).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / place).write_text(text, encoding="utf-8")


def _place(path: str) -> str:
    return "index.md" if path == "README.md" else path


def _fenced(file: Path) -> str:
    language = LANGUAGES.get(file.suffix, "text")
    return f"````````{language}\n{file.read_text(encoding='utf-8')}\n````````"


def _toctree(caption: str | None, paths: Iterable[str]) -> str:
    """Write a part of the table of contents in the margin."""
    listed = "\n".join(path.removesuffix(".md") for path in paths)
    options = ":hidden:\n" + f":caption: {caption}\n" * bool(caption)
    return f"\n```{{toctree}}\n{options}\n{listed}\n```\n"
