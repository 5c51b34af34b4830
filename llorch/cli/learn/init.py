"""`llorch learn init`: make a folder with a stub for every lesson."""

from pathlib import Path

import click

from llorch.cli.options import verb
from llorch.cli.output import say

PROJECT = """\
[tool.llorch]
impl = "."  # your implementation, for llorch learn, llorch run and pytest
"""


@verb(
    "Make a folder with a stub for every lesson.",
    "llorch learn init my_llama",
    "llorch learn init my_llama && cd my_llama && llorch learn",
    "llorch learn init .   # the stubs that are missing here",
)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def command(*, folder: Path) -> None:
    """Write one stub file per lesson to FOLDER, and a pyproject.toml that names the folder.

    Files that exist stay as they are.
    """
    make_folder(folder)
    say(f"next: cd {folder} && llorch learn")


def make_folder(folder: Path) -> None:
    """Write the stubs and the pyproject.toml that are missing in a folder, and print how many."""
    from llorch.apps.learn.lessons import LESSONS, stub_of

    files = {"pyproject.toml": PROJECT} | {f"{lesson.module}.py": stub_of(lesson) for lesson in LESSONS}
    folder.mkdir(parents=True, exist_ok=True)
    missing = {name: text for name, text in files.items() if not (folder / name).exists()}
    for name, text in missing.items():
        with (folder / name).open("x", encoding="utf-8") as file:
            file.write(text)
    note = f", {len(files) - len(missing)} existing files kept" if len(missing) < len(files) else ""
    click.echo(f"{folder}: {len(missing)} files written{note}")
