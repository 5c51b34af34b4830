"""A model of the Hugging Face hub as a user writes it: `org/name[:QUANT][@REVISION]`."""

import re
from dataclasses import dataclass
from pathlib import Path

_PATTERN = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<quant>[\w.-]+))?(?:@(?P<revision>[\w.-][\w./-]*))?",
    re.ASCII,
)


@dataclass(frozen=True)
class Reference:
    """The repository, quantisation and revision of a model of the hub."""

    repo: str  # org/name
    quant: str = ""  # what the name of a GGUF file has, as Q4_K_M; or all of that name
    revision: str = ""  # a branch, a tag or a commit; empty for main

    @classmethod
    def parse(cls, spec: str) -> "Reference | None":
        """Read what a user writes; None for what can only be a path, or a built-in name."""
        match = _PATTERN.fullmatch(spec)
        if match is None or match["repo"].endswith((".gguf", ".safetensors")):
            return None
        return cls(match["repo"], match["quant"] or "", match["revision"] or "")

    def __str__(self) -> str:
        quant = f":{self.quant}" if self.quant else ""
        return f"{self.repo}{quant}" + (f"@{self.revision}" if self.revision else "")


def name_of(path: Path) -> str:
    """Return the name of a model: a file's stem, a folder's name, or the repository in huggingface_hub's cache."""
    if path.is_file():
        return path.stem
    repo = path.parent.parent.name
    if path.parent.name == "snapshots" and repo.startswith("models--"):
        return repo.removeprefix("models--").replace("--", "/", 1)
    return path.name
