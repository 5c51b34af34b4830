"""Files of goldens, as what they hold."""

import lzma
from pathlib import Path


def read_unpacked(path: Path) -> bytes:
    """The content of a file, of a compressed one what went in: versions of liblzma may pack it otherwise."""
    content = path.read_bytes()
    return lzma.decompress(content) if path.suffix == ".xz" else content
