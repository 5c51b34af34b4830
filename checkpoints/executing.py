"""Run a lesson with Jupyter, cell by cell, and put the output of a cell below it."""

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import jupytext
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, CellExecutionError, DeadKernelError
from nbformat import NotebookNode

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
SECONDS = 60  # limit for one cell
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def executed(lesson: Path, root: Path) -> str:
    """Make the page of a lesson.

    Args:
        lesson: A file in percent format.
        root: Folder where it runs, and from which it imports first.

    Returns:
        Markdown.

    Raises:
        click.ClickException: A cell raised an error, took too long, wrote to stderr, or showed no text.
    """
    notebook = jupytext.read(lesson, fmt="py:percent")
    with TemporaryDirectory(prefix="llorch") as folder:
        _run(notebook, lesson, root, folder)
    blocks = [text for n, cell in enumerate(notebook.cells, 1) for text in _cell_blocks(cell, f"{lesson}, cell {n}")]
    return "\n\n".join(blocks) + "\n"


def _run(notebook: NotebookNode, lesson: Path, root: Path, folder: str) -> None:
    """Run the cells without the network (sockets are files) and without the user's configuration."""
    environment = dict(os.environ) | dict.fromkeys(THREADS, "1") | {"IPYTHONDIR": folder, "JUPYTER_CONFIG_DIR": folder}
    environment["PYTHONPATH"] = str(root)
    kernel = AsyncKernelManager(
        transport="ipc", connection_file=f"{folder}/kernel.json", kernel_spec_manager=KernelSpecManager(kernel_dirs=[])
    )
    client = NotebookClient(notebook, km=kernel, timeout=SECONDS, ipython_hist_file=":memory:")
    try:
        asyncio.run(client.async_execute(cwd=str(root), env=environment, cleanup_kc=True))
    except (CellExecutionError, CellControlSignal, DeadKernelError) as error:
        raise click.ClickException(f"{lesson}, {_describe_error(notebook, error)}") from None


def _describe_error(notebook: NotebookNode, error: Exception) -> str:
    """Name the cell that ended the run, and its last frame."""
    code = [n for n, cell in enumerate(notebook.cells, 1) if cell.cell_type == "code"]
    begun = [n for n in code if "execution" in notebook.cells[n - 1].metadata]
    failed = [out for n in begun for out in notebook.cells[n - 1].outputs if out.output_type == "error"]
    message = "\n".join(COLOURS.sub("", frame) for frame in failed[-1].traceback[-2:]) if failed else str(error)
    return f"cell {(begun or code)[-1]}: {message}"


def _cell_blocks(cell: NotebookNode, label: str) -> Iterator[str]:
    if cell.cell_type == "markdown":
        yield cell.source
    elif cell.cell_type == "code" and cell.source.strip():
        yield f"```python\n{cell.source}\n```"
        if printed := "".join(_text(output, label) for output in cell.outputs).rstrip():
            yield f"```text\n{printed}\n```"


def _text(output: NotebookNode, label: str) -> str:
    if output.output_type == "stream" and output.name == "stdout":
        return output.text
    if output.output_type == "execute_result" and set(output.data) == {"text/plain"}:
        return output.data["text/plain"] + "\n"
    actual = output.get("text") or ", ".join(output.get("data", ()))
    raise click.ClickException(f"{label}: expected text on stdout, got {output.get('name', 'a display')}: {actual}")
