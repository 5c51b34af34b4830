"""Running the command line: in this process, or as a user does."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

REPOSITORY = Path(__file__).parents[3]


def invoke(*args: str, stdin: str = "") -> Result:
    """Run a command in this process; stdout and stderr are kept apart."""
    from llorch.cli import main

    return CliRunner().invoke(main, list(args), input=stdin, prog_name="llorch")


def spawn(*args: str, stdin: str = "", cwd: Path = REPOSITORY, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "llorch", *args], input=stdin, capture_output=True, text=True, timeout=600, check=False,
        cwd=cwd, env=os.environ | environment,
    )  # fmt: skip


def words_of(line: str) -> list[str]:
    """Split a command line; programs before and after llorch, and remarks, are left out."""
    words = shlex.split(re.sub(r"<\((.*?)\)", r"\1", line), comments=True)
    words = words[words.index("llorch") + 1 :]
    end = next((place for place, word in enumerate(words) if word in ("|", ">", ">>", "&&")), len(words))
    return words[:end]
