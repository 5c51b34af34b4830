"""Checks before and after writing a model: target path, disk space, and reading the written model."""

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
_EXTRAS = (  # settings and tokenizer files
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())


def copy_companions(source: Path, folder: Path) -> None:
    """Copy the tokenizer and settings files of a model folder; Unsafe for a link out of the folder."""
    companions = [require_inside(source / name, source) for name in _EXTRAS if (source / name).is_file()]
    for file in [*companions, *template_files(source).values()]:
        target = folder / file.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)


def without_quantisation(values: Mapping[str, object]) -> dict[str, object]:
    """Remove the settings of a quantised folder from a config.json."""
    settings = {key: value for key, value in values.items() if key not in SETTINGS}
    text = settings.get("text_config")
    return settings | {"text_config": without_quantisation(text)} if isinstance(text, Mapping) else settings


def _is_model_file(file: Path) -> bool:
    if file.is_dir():
        return file.name == MORE_TEMPLATES and all(f.suffix == ".jinja" and f.is_file() for f in file.iterdir())
    names = {*_EXTRAS, TEMPLATE, "model.safetensors.index.json"}
    return file.is_file() and (file.name in names or file.suffix == ".safetensors")


def check_target(
    *sources: Path, target: Path, force: bool, what: str = "a model", known: Callable[[Path], bool] = _is_model_file
) -> None:
    """Raise if a source is missing, or if the target cannot be written without harm.

    FileNotFoundError: a source is missing. NotADirectoryError: the target's folder is a file; `folders_above` creates
    missing folders. UserError: the target is or contains a source. FileExistsError: the target exists without `force`,
    is a folder but a file is to be written, or has a file that is not `known`; the message names the files as `what`.
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


def _reason_to_keep(target: Path, subject: str, is_known: Callable[[Path], bool]) -> str:
    """Return the reason not to replace an existing target even with --force; empty if it can be replaced."""
    to_gguf = target.suffix == ".gguf"
    if target.is_dir() == to_gguf:
        kind = "a folder" if to_gguf else "a file"
        return f"is {kind}, and llorch does not replace it; choose another name"
    unknown_files = sorted(file.name for file in target.iterdir() if not is_known(file)) if not to_gguf else []
    remedy = "choose another name, llorch does not replace this folder"
    return f"holds {unknown_files[0]}, which is no file of {subject}; {remedy}" if unknown_files else ""


def count_tensors(weights: Weights, report: Callable[[str], None]) -> Callable[[str], None]:
    """Return a callback for writers that reports the number of tensors."""
    n_tensors, n_done = len(inventory(weights.config)), 0

    def on_tensor(name: str) -> None:
        nonlocal n_done
        n_done += 1
        report(f"{min(n_done, n_tensors)}/{n_tensors} {name}")

    return on_tensor


@contextmanager
def reporting_disk_errors(target: Path, n_bytes: int) -> Iterator[None]:
    """Raise OSError if the disk is too small; name the target, not the temporary file, if writing fails."""
    disk = shutil.disk_usage(existing_folder(target))
    if disk.total and n_bytes > disk.free:  # total is 0 for /proc and a tmpfs without limit; there writing itself fails
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
    """Round floats to float32, as in GGUF files; other values do not change."""
    if isinstance(value, Temperature):
        return replace(value, scale=float(np.float32(value.scale)))
    return np.float32(value) if isinstance(value, float) else value


def read_back(path: Path, weights: Weights, target: Path) -> None:
    """Open a written model and check that its configuration equals the source's up to float32 rounding."""
    written = open_weights(path)
    written.source.close()
    equivalent_families = {written_family(weights.config), BY_GGUF[FAMILIES[weights.config.family].gguf]}
    for option in filter(lambda option: option.compare, fields(ModelConfig)):
        actual, expected = (_as_float32(getattr(config, option.name)) for config in (written.config, weights.config))
        # Each format has its own representation of frequency scaling.
        if (
            actual != expected
            and option.name != "rope_scaling"
            and not (option.name == "family" and actual in equivalent_families)
        ):
            message = f"{option.name}: the target would have {actual}, the source has {expected}"
            raise FormatError("Inconsistent", message, path=target)
