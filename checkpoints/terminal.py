"""Draw the picture of README.md: the output of `llorch verify`, as a terminal shows it.

    python checkpoints/terminal.py

The command really runs, so the seconds are those of this machine. The picture brings its own dark ground, so it reads
on a white page and on a black page, and it loads no font.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

PICTURE = Path(__file__).with_name("verify.svg")
WIDTH = 110  # columns
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def main() -> None:
    """Run `llorch verify` and write the picture.

    Raises:
        SystemExit: A comparison failed.
    """
    process = subprocess.run([sys.executable, "-m", "llorch", "verify"], capture_output=True, text=True, check=False)
    if process.returncode:
        sys.exit(f"llorch verify: expected exit code 0, got {process.returncode}\n{process.stderr}")
    PICTURE.write_text(picture(["$ llorch verify", *process.stdout.splitlines()]), encoding="utf-8")


def picture(lines: Iterable[str]) -> str:
    """Draw lines as a terminal shows them.

    Args:
        lines: The command, then its output.

    Returns:
        The SVG, the same in every run on the same lines.
    """
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines:
        text = Text(line)
        text.highlight_regex(r"\bPASS\b", "bold green")
        text.highlight_regex(r"\bFAIL\b", "bold red")
        text.highlight_regex(r"^\$.*", "bold")
        console.print(text, highlight=False)
    svg = console.export_svg(title="llorch verify", theme=MONOKAI, unique_id="verify")
    return FONTS.sub("", svg).replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")


if __name__ == "__main__":
    main()
