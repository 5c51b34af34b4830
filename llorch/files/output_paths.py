"""Where a model is written: what must not be replaced, whether there is room, and a look at what was written."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from llorch.families.config import ModelConfig
from llorch.families.layers import Temperature
from llorch.families.table import BY_GGUF, FAMILIES
from llorch.files import Weights, open_weights
from llorch.files.folder import require_inside
from llorch.files.new_file import existing_folder, folders_above
from llorch.files.quantised import SETTINGS
from llorch.files.tensor_names import inventory, written_family
from llorch.files.tokenizer.chat import MORE_TEMPLATES, template_files
from llorch.runtime.errors import FormatError, UserError

CONFIG, TEMPLATE = "config.json", "chat_template.jinja"
_BESIDE = (
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip


def size_of(path: Path) -> int:
    """Sum the bytes of a file, or of the files in a folder."""
    return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())


def copied_beside(source: Path, folder: Path) -> None:
    """Copy the files beside the tensors, e.g. of the tokenizer, byte for byte; Unsafe for one that links out."""
    named = [require_inside(source / name, source) for name in _BESIDE if (source / name).is_file()]
    for file in [*named, *template_files(source).values()]:
        copy = folder / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def without_quantisation(values: Mapping[str, object]) -> dict[str, object]:
    """Remove the settings of a quantised folder from a config.json."""
    kept = {key: value for key, value in values.items() if key not in SETTINGS}
    text = kept.get("text_config")
    return kept | {"text_config": without_quantisation(text)} if isinstance(text, Mapping) else kept


def _is_of_a_model(file: Path) -> bool:
    if file.is_dir():
        return file.name == MORE_TEMPLATES and all(one.suffix == ".jinja" and one.is_file() for one in file.iterdir())
    known = {*_BESIDE, TEMPLATE, "model.safetensors.index.json"}
    return file.is_file() and (file.name in known or file.suffix == ".safetensors")


def check_places(
    *sources: Path, target: Path, force: bool, what: str = "a model", known: Callable[[Path], bool] = _is_of_a_model
) -> None:
    """Refuse a target that cannot be written without harm.

    FileNotFoundError: no source. NotADirectoryError: a file stands where the target's folder would be; `folders_above`
    makes folders that are missing. ValueError: it is a source, or holds one.
    FileExistsError: it exists, without `force`; or is a folder where a file is written, or holds what is not `known`.
    """
    for source in sources:
        if not source.exists():
            raise FileNotFoundError(f"{source}: no such file or folder")
    if not existing_folder(target).is_dir():
        message = f"expected a folder for {target}, got a file; choose another name"
        raise NotADirectoryError(errno.ENOTDIR, message, str(existing_folder(target)))
    if not target.exists():
        return
    for source in sources:
        if source.samefile(target) or target.resolve() in source.resolve().parents:
            raise UserError(f"{target}: the target would replace the source {source}; choose another name")
    if not force:
        raise FileExistsError(errno.EEXIST, "exists; choose another name, or replace it with --force", str(target))
    if message := _reason_to_keep(target, what, known):
        raise FileExistsError(errno.EEXIST, message, str(target))


def _reason_to_keep(target: Path, what: str, known: Callable[[Path], bool]) -> str:
    """Say why a file or folder is not replaced even with --force; empty where it is."""
    to_gguf = target.suffix == ".gguf"
    if target.is_dir() == to_gguf:
        kind = "a folder" if to_gguf else "a file"
        return f"is {kind}, and llorch does not replace it; choose another name"
    foreign = sorted(file.name for file in target.iterdir() if not known(file)) if not to_gguf else []
    remedy = "choose another name, llorch does not replace this folder"
    return f"holds {foreign[0]}, which is no file of {what}; {remedy}" if foreign else ""


def counting(weights: Weights, report: Callable[[str], None]) -> Callable[[str], None]:
    """Make a listener for writers that reports how many tensors were begun."""
    total, done = len(inventory(weights.config)), 0

    def on_tensor(name: str) -> None:
        nonlocal done
        done += 1
        report(f"{min(done, total)}/{total} {name}")

    return on_tensor


@contextmanager
def placing(target: Path, n_bytes: int) -> Iterator[None]:
    """Refuse (OSError) what would not fit; name the target, not the temporary file, when writing fails."""
    disk = shutil.disk_usage(existing_folder(target))
    if disk.total and n_bytes > disk.free:  # /proc and a tmpfs without limit have 0: there the writing tells
        message = f"needs {_format_size(n_bytes)}, but only {_format_size(disk.free)} are free; nothing was written"
        raise OSError(errno.ENOSPC, message, str(target))
    try:
        with folders_above(target):
            yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(error.errno or errno.EIO, f"{reason}; nothing was written", str(target)) from error


def _format_size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e7 else f"{n_bytes / 1e3:.0f} kB"


def _as_float32(value: object) -> object:
    """Round floats to float32, as GGUF files hold them; other values stay."""
    if isinstance(value, Temperature):
        return replace(value, scale=float(np.float32(value.scale)))
    return np.float32(value) if isinstance(value, float) else value


def read_back(path: Path, weights: Weights, target: Path) -> None:
    """Open what was written: every tensor is there, and the configuration is the same to float32 rounding."""
    written = open_weights(path)
    written.source.close()
    same = {written_family(weights.config), BY_GGUF[FAMILIES[weights.config.family].gguf]}
    for one in filter(lambda one: one.compare, fields(ModelConfig)):
        actual, expected = (_as_float32(getattr(config, one.name)) for config in (written.config, weights.config))
        # Frequency scalings have a form of their own in each format.
        if actual != expected and one.name != "rope_scaling" and not (one.name == "family" and actual in same):
            message = f"{one.name}: the target would have {actual}, the source has {expected}"
            raise FormatError("Inconsistent", message, path=target)
