"""Code blocks of README.md and of the pages in checkpoints/guide, each found by the comment in the line above it.

    python tests/support/readme_blocks.py install

prints the block that is run under this name: the one below `<!-- run: install -->`. The page does not show the
comment. A comment that is missing, that stands there twice or that has no block below it is an error. Only
Python's own modules are imported.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("checkpoints/guide/*.md"))]


def marked_block(page: str, name: str, *, kind: str = "run") -> str:
    """Find the block below a comment.

    Args:
        page: The text of the page, or of several.
        name: The name in the comment.
        kind: `run` for commands, `printed` for their output.

    Returns:
        The lines of the block.

    Raises:
        ValueError: There is not exactly one such comment, or no block below it.
    """
    comment = f"<!-- {kind}: {name} -->"
    found = page.count(comment)
    if found != 1:
        raise ValueError(f"README.md and its guide: expected {comment} once, got it {found} times")
    block = re.search(rf"^{re.escape(comment)}\n```\w*\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    if block is None:
        raise ValueError(f"README.md and its guide: expected a code block below {comment}, got none")
    return block[1]


def readme_block(name: str, *, kind: str = "run") -> str:
    """Find the block below a comment of README.md or of its guide; see `marked_block`."""
    return marked_block("\n".join(page.read_text(encoding="utf-8") for page in PAGES), name, kind=kind)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} NAME")
    try:
        sys.stdout.write(readme_block(sys.argv[1]))
    except ValueError as error:
        sys.exit(str(error))
