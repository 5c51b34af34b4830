"""Code blocks of README.md, each found by the comment in the line above it: `<!-- run: install -->`.

    python tests/support/readme_blocks.py install

prints the block that is run under this name. The page does not show the comment. A comment that is missing, that stands
there twice or that has no block below it is an error that names it. Nothing is imported but what Python brings.
"""

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def marked_block(page: str, name: str, *, kind: str = "run") -> str:
    """Find the block below a comment.

    Args:
        page: The text of the page.
        name: The name in the comment.
        kind: `run` for what is run, `printed` for what comes out.

    Returns:
        The lines of the block.

    Raises:
        ValueError: There is not exactly one such comment, or no block below it.
    """
    comment = f"<!-- {kind}: {name} -->"
    found = page.count(comment)
    if found != 1:
        raise ValueError(f"README.md: expected {comment} once, got it {found} times")
    block = re.search(rf"^{re.escape(comment)}\n```\w*\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    if block is None:
        raise ValueError(f"README.md: expected a code block below {comment}, got none")
    return block[1]


def readme_block(name: str, *, kind: str = "run") -> str:
    """Find the block below a comment of README.md; see `marked_block`."""
    return marked_block(README.read_text(encoding="utf-8"), name, kind=kind)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} NAME")
    try:
        sys.stdout.write(readme_block(sys.argv[1]))
    except ValueError as error:
        sys.exit(str(error))
