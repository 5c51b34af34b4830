"""The name of a model of the Hugging Face hub, `org/name[:QUANT][@REVISION]`, and the files that make up the model.

These are a folder of safetensors, or a GGUF file or its parts; no pickle.
"""

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

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


CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_BESIDE = (  # what says how a model is used; the last ones are for transformers
    CONFIG, "generation_config.json", *TOKENIZER, "chat_template.jinja", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
_TEMPLATES = re.compile(r"additional_chat_templates/[^/]+\.jinja")
_PART = re.compile(r"(?P<model>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # GGUF files that lie beside models


def is_folder(files: Collection[str]) -> bool:
    """Return whether a repository holds a Hugging Face folder whose weights are safetensors."""
    return CONFIG in files and (WEIGHTS in files or INDEX in files)


def of_folder(files: Collection[str], shards: Iterable[str]) -> list[str]:
    """List the files of a Hugging Face folder; its weights are in one file, or in shards that its index names."""
    beside = [name for name in files if name in _BESIDE or _TEMPLATES.fullmatch(name)]
    return sorted([*beside, *([WEIGHTS] if WEIGHTS in files else [INDEX, *shards])])


def shards_of(index: Path) -> list[str]:
    """Return the files that an index names; for another file ValueError, KeyError, TypeError or AttributeError."""
    weight_map = json.loads(index.read_bytes())["weight_map"]
    return sorted({str(name) for name in weight_map.values()})


def files_of_gguf(files: Iterable[str], wanted: Reference) -> list[str]:
    """Find the GGUF file that is meant, or all parts of it in order; FileNotFoundError for none or several models."""
    models = sorted(name for name in files if name.lower().endswith(".gguf") and not _NO_MODEL.search(name))
    if not models:
        raise FileNotFoundError(f"model '{wanted}': {_without_models(files, wanted)}")
    found = [name for name in models if _is_meant(PurePosixPath(name).name, wanted.quant)]
    named: dict[str, list[str]] = {}
    for name in [name for name in found if not _PART.fullmatch(name)] or found:  # a whole file before one in parts
        part = _PART.fullmatch(name)
        named.setdefault(f"{part['model']} of {part['count']}" if part else name, []).append(name)
    if len(named) == 1:
        (one,) = named.values()
        return _whole(one, wanted)
    what = "several GGUF files" if named else f"no GGUF file of {wanted.quant}"
    example = f"{wanted.repo}:{wanted.quant or 'QUANT'}"
    listed = ", ".join(names[0] for names in named.values()) or ", ".join(models)
    raise FileNotFoundError(f"model '{wanted}': {what}; choose a file with {example}, from: {listed}")


def _whole(names: list[str], wanted: Reference) -> list[str]:
    """Refuse a model of which parts are missing."""
    first = _PART.fullmatch(names[0])
    n_parts = int(first["count"]) if first else 1
    if len(names) != n_parts:
        message = f"expected {n_parts} parts, the repository has {len(names)}: {', '.join(names[:4])}"
        raise FileNotFoundError(f"model '{wanted}': {message}")
    return names


def _is_meant(name: str, quant: str) -> bool:
    if not quant or name.lower() == quant.lower():
        return True
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(quant)}(?![A-Za-z0-9_])", name, re.IGNORECASE) is not None


def _without_models(files: Iterable[str], wanted: Reference) -> str:
    """Explain why a repository has no model that llorch can read."""
    if wanted.quant:
        return "the repository has no GGUF file; leave :QUANT out"
    pickles = sorted(name for name in files if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt")))
    if pickles:
        return f"the weights are pickles ({pickles[0]}), which can run code, so llorch does not download them"
    return f"the repository has neither {CONFIG} with {WEIGHTS} nor a GGUF file"
