"""The engines of the atlas: which adapter runs each, on which kind of file, and in which ways."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ADAPTERS = Path(__file__).parent / "engines"
_ONE_WAY: Mapping[str, Mapping[str, Any]] = {"": {}}


@dataclass(frozen=True)
class Engine:
    """An engine that somebody else wrote.

    Attributes:
        name: For people, and on the command line.
        script: Of its adapter and its requirements, below `ADAPTERS`.
        gguf: Whether it reads GGUF files.
        folders: Whether it reads Hugging Face folders.
        ways: Options of the adapter, by the name of the row.
        is_witness: Whether it is one that llorch has for goldens, and runs in llorch's own environment.
        npm: Packages of Node.js that it consists of.
        why_not: Why it cannot be run from a package registry on a processor; empty where it can.
    """

    name: str
    script: str
    gguf: bool = False
    folders: bool = True
    ways: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: _ONE_WAY)
    is_witness: bool = False
    npm: tuple[str, ...] = ()
    why_not: str = ""


ENGINES: tuple[Engine, ...] = ()
