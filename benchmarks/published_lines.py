"""Lines of the table of `published.py`, the published model, and files that several parts share."""

import functools
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "The capital of France is"
_WORK = tempfile.TemporaryDirectory(prefix="published-")


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    what: str
    judge: str
    n: int  # number of comparisons; 0 if nothing ran, then the note gives the reason
    wrong: int
    note: str = ""

    def __str__(self) -> str:
        return f"| {self.what} | {self.judge} | {self.n} | {self.wrong} | {self.note} |"

    def as_json(self) -> dict[str, object]:
        """Return the line as a dict for `--json`."""
        return asdict(self)


def not_run(title: str, judge: str, reason: str) -> Line:
    """Make the line of a part that could not run."""
    return Line(title, judge, 0, 0, f"NOT RUN: {' '.join(reason.split())}")


def progress(text: str) -> None:
    """Write a line with the time to stderr."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def all_lines(lines: Iterable[str]) -> str:
    """Join the lines of a note."""
    return "; ".join(line for line in lines if line)


def material() -> Path:
    """Return the folder of the fetched material; exit if it is not set."""
    folder = os.environ.get("LLORCH_VOCABULARIES")
    if not folder:
        sys.exit("published: LLORCH_VOCABULARIES is not set; tests/support/fetch_vocabularies.py gets the files")
    return Path(folder)


def smollm2() -> Path:
    """Return the published model."""
    from fetch_vocabularies import MODEL

    return material() / MODEL


def work(name: str) -> Path:
    """Return a path for a temporary file; all of them are removed at the end."""
    return Path(_WORK.name) / name


@functools.cache
def decoded() -> Path:
    """Return the published model decoded to F32, as `llorch convert` writes it."""
    from llorch.files.convert import convert
    from llorch.files.quant import GGMLType

    path = work("smollm2-f32.gguf")
    convert(smollm2(), path, ggml_type=GGMLType.F32)
    return path


@functools.cache
def decoded_folder() -> Path:
    """Return the published model as a Hugging Face folder in float32, as `llorch convert` writes it."""
    from llorch.files.convert import convert
    from llorch.files.quant import GGMLType

    path = work("smollm2-folder")
    convert(smollm2(), path, ggml_type=GGMLType.F32)
    return path


def tool(name: str) -> Path | None:
    """Return a program that tests/support/build_llama_tools.py built, or None."""
    path = material() / "tools" / name
    return path if path.exists() else None
