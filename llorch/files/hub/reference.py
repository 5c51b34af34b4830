"""Name of a model of the Hugging Face hub, `org/name[:QUANT][@REVISION]`, and the files of the model.

The files are a folder of safetensors, or a GGUF file or its parts, never a pickle.
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
    """Repository, quantisation and revision of a hub model."""

    repo: str  # org/name
    quant: str = ""  # part of a GGUF file name, such as Q4_K_M, or the whole name
    revision: str = ""  # a branch, a tag or a commit; empty for main

    @classmethod
    def parse(cls, spec: str) -> "Reference | None":
        """Parse a hub name; None if it can only be a path or a built-in name."""
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
_EXTRA_FILES = (  # settings and tokenizer; the last ones are for transformers
    CONFIG, "generation_config.json", *TOKENIZER, "chat_template.jinja", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
_TEMPLATES = re.compile(r"additional_chat_templates/[^/]+\.jinja")
_PART = re.compile(r"(?P<model>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)  # split model
_OTHER_GGUF = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # GGUF files that are no language model


def is_folder(files: Collection[str]) -> bool:
    """Check if a repository is a Hugging Face folder with safetensors weights."""
    return CONFIG in files and (WEIGHTS in files or INDEX in files)


def of_folder(files: Collection[str], shards: Iterable[str]) -> list[str]:
    """Return the files of a Hugging Face folder, with weights in one file or in the given shards."""
    extra_files = [name for name in files if name in _EXTRA_FILES or _TEMPLATES.fullmatch(name)]
    return sorted([*extra_files, *([WEIGHTS] if WEIGHTS in files else [INDEX, *shards])])


def read_shard_names(index: Path) -> list[str]:
    """Return the file names in an index; ValueError, KeyError, TypeError or AttributeError if it is no index."""
    weight_map = json.loads(index.read_bytes())["weight_map"]
    return sorted({str(name) for name in weight_map.values()})


def find_gguf_files(files: Iterable[str], model: Reference) -> list[str]:
    """Return the requested GGUF file, or all parts of a split model; FileNotFoundError for none or several models."""
    models = sorted(name for name in files if name.lower().endswith(".gguf") and not _OTHER_GGUF.search(name))
    if not models:
        raise FileNotFoundError(f"model '{model}': {_without_models(files, model)}")
    matches = [name for name in models if _matches_quant(PurePosixPath(name).name, model.quant)]
    files_by_model: dict[str, list[str]] = {}
    for name in [name for name in matches if not _PART.fullmatch(name)] or matches:  # whole files first
        part = _PART.fullmatch(name)
        files_by_model.setdefault(f"{part['model']} of {part['count']}" if part else name, []).append(name)
    if len(files_by_model) == 1:
        (model_files,) = files_by_model.values()
        return _complete_parts(model_files, model)
    problem = "several GGUF files" if files_by_model else f"no GGUF file of {model.quant}"
    example = f"{model.repo}:{model.quant or 'QUANT'}"
    choices = ", ".join(names[0] for names in files_by_model.values()) or ", ".join(models)
    raise FileNotFoundError(f"model '{model}': {problem}; choose a file with {example}, from: {choices}")


def _complete_parts(names: list[str], model: Reference) -> list[str]:
    """Return the parts of a model; FileNotFoundError if parts are missing."""
    part = _PART.fullmatch(names[0])
    n_parts = int(part["count"]) if part else 1
    if len(names) != n_parts:
        message = f"expected {n_parts} parts, the repository has {len(names)}: {', '.join(names[:4])}"
        raise FileNotFoundError(f"model '{model}': {message}")
    return names


def _matches_quant(name: str, quant: str) -> bool:
    if not quant or name.lower() == quant.lower():
        return True
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(quant)}(?![A-Za-z0-9_])", name, re.IGNORECASE) is not None


def _without_models(files: Iterable[str], model: Reference) -> str:
    """Describe why a repository has no model that llorch can read."""
    if model.quant:
        return "the repository has no GGUF file; leave :QUANT out"
    pickles = sorted(name for name in files if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt")))
    if pickles:
        return f"the weights are pickles ({pickles[0]}), which can run code, so llorch does not download them"
    return f"the repository has neither {CONFIG} with {WEIGHTS} nor a GGUF file"
