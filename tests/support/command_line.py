"""Running the command line: in this process, or as a user does."""

import os
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

REPOSITORY = Path(__file__).parents[2]


def invoke(*args: str, stdin: str = "") -> Result:
    """Run a command in this process; stdout and stderr are kept apart."""
    from llorch.cli import main

    return CliRunner().invoke(main, list(args), input=stdin, prog_name="llorch")


def spawn(*args: str, stdin: str = "", cwd: Path = REPOSITORY, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "llorch", *args],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=cwd,
        env=os.environ | environment,
    )
