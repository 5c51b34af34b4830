"""Which files of a repository a model is made of: a folder of safetensors, or one GGUF file; never a pickle."""

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from llorch.hub.reference import Reference

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_BESIDE = (  # what says how a model is used; the last ones are for transformers
    CONFIG, "generation_config.json", *TOKENIZER, "chat_template.jinja", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
_TEMPLATES = re.compile(r"additional_chat_templates/[^/]+\.jinja")
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # GGUF files that lie beside models


def is_folder(files: Collection[str]) -> bool:
    """Whether a repository holds a Hugging Face folder whose weights are safetensors."""
    return CONFIG in files and (WEIGHTS in files or INDEX in files)


def of_folder(files: Collection[str], shards: Iterable[str]) -> list[str]:
    """Files of a Hugging Face folder, whose weights are in one file, or in the shards that its index names."""
    beside = [name for name in files if name in _BESIDE or _TEMPLATES.fullmatch(name)]
    return sorted([*beside, *([WEIGHTS] if WEIGHTS in files else [INDEX, *shards])])


def shards_of(index: Path) -> list[str]:
    """Files that an index names; ValueError where it is none."""
    weight_map = json.loads(index.read_bytes())["weight_map"]
    return sorted({str(name) for name in weight_map.values()})


def one_gguf(files: Iterable[str], wanted: Reference) -> str:
    """The GGUF file that is meant; FileNotFoundError for none, for several, and for one in parts."""
    models = sorted(name for name in files if name.lower().endswith(".gguf") and not _NO_MODEL.search(name))
    if not models:
        raise FileNotFoundError(f"model '{wanted}': {_without_models(files, wanted)}")
    found = [name for name in models if _is_meant(PurePosixPath(name).name, wanted.quant)]
    whole = [name for name in found if not _PART.search(name)]
    if len(whole) == 1:
        return whole[0]
    if found and not whole:
        message = f"{found[0]} is one of {len(found)} parts, which are not read; join them: llama-gguf-split --merge"
        raise FileNotFoundError(f"model '{wanted}': {message}")
    what = "several GGUF files" if whole else f"no GGUF file of {wanted.quant}"
    example = f"{wanted.repo}:{wanted.quant or 'QUANT'}"
    raise FileNotFoundError(f"model '{wanted}': {what}; say which as {example}, of: {', '.join(whole or models)}")


def _is_meant(name: str, quant: str) -> bool:
    if not quant or name.lower() == quant.lower():
        return True
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(quant)}(?![A-Za-z0-9_])", name, re.IGNORECASE) is not None


def _without_models(files: Iterable[str], wanted: Reference) -> str:
    if wanted.quant:
        return "the repository has no GGUF file; leave :QUANT out"
    pickles = sorted(name for name in files if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt")))
    if pickles:
        return f"its weights are pickles ({pickles[0]}), which can run code and are not fetched"
    return f"the repository has neither {CONFIG} with {WEIGHTS} nor a GGUF file"
