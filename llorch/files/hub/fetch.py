"""Fetch a model of the hub: search huggingface_hub's cache, list missing files, check disk space, download.

huggingface_hub downloads the files. llorch requests only the model's files of a repository. Errors of the hub and the
network become one line. `look` makes no request.

Source: huggingface_hub, "Understand caching": in models--org--name/, refs/REVISION has a commit and snapshots/COMMIT
the files.
"""

import errno
import glob
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llorch.files.hub.reference import (
    CONFIG,
    INDEX,
    TOKENIZER,
    WEIGHTS,
    Reference,
    find_gguf_files,
    is_folder,
    of_folder,
    read_shard_names,
)
from llorch.runtime.errors import MissingExtra


@dataclass(frozen=True)
class Cached:
    """Model in the cache."""

    path: Path  # GGUF file, or folder
    commit: str  # commit of the repository
    has_tokenizer: bool = True  # False for a folder that another program fetched without tokenizer


def repository_folder(repo: str) -> Path:
    """Return the cache folder of a repository."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def look(model: Reference) -> Cached | None:
    """Find a model in the cache, at the commit that its revision had at its last download; None if incomplete."""
    repository = repository_folder(model.repo)
    folder = repository / "snapshots" / _commit(repository, model.revision or "main")
    # A link to a deleted blob is no file.
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if not model.quant and is_folder(files):
        is_complete = all((folder / name).exists() for name in _weight_files(folder))
        has_tokenizer = all((folder / name).exists() for name in (CONFIG, *TOKENIZER))
        return Cached(folder, folder.name, has_tokenizer) if is_complete else None
    try:
        return Cached(folder / find_gguf_files(files, model)[0], folder.name)
    except FileNotFoundError:
        return None


def _commit(repository: Path, revision: str) -> str:
    """Return the commit that a revision had at its last download, "none" (no such folder) if there was none."""
    if re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    ref = repository / "refs" / revision
    return ref.read_text().strip() if ref.is_file() else "none"


def _weight_files(folder: Path) -> list[str]:
    """Return the weight files of a folder, by its index; the index itself if it cannot be read."""
    if (folder / WEIGHTS).exists():
        return [WEIGHTS]
    try:
        return read_shard_names(folder / INDEX)
    except (ValueError, KeyError, TypeError, AttributeError):
        return [INDEX]  # opening the folder reports the error


def obtain(model: Reference, *, consent: Callable[[str], bool], report: Callable[[str], None]) -> Path:
    """Return the path of a hub model, from the cache or downloaded; see `llorch.files.hub.find`."""
    try:
        import huggingface_hub  # noqa: F401
    except ModuleNotFoundError:
        missing = MissingExtra("hub", "huggingface_hub")
        raise FileNotFoundError(f"{_not_found(model)}; to search the Hugging Face hub: {missing}") from None
    with _one_line_errors(model):
        cached = look(model)
    if cached is None or not cached.has_tokenizer:
        try:
            return _download(model, consent, report)
        except Unreachable as error:
            if cached is None:
                raise
            report(f"{model}: {error.why}; the cached copy has no tokenizer")
    report(f"{model}: commit {cached.commit}, from the cache")
    return cached.path


class Unreachable(FileNotFoundError):
    """Error of a hub that cannot be reached."""

    def __init__(self, model: Reference, why: str, remedy: str) -> None:
        """Name the model, the reason (`why`), and what to do (`remedy`)."""
        super().__init__(f"{_not_found(model)}, not in the cache of the Hugging Face hub, and {why}; {remedy}")
        self.why = why


def _not_found(model: Reference) -> str:
    return f"model '{model}': no such file or folder"


def _download(model: Reference, consent: Callable[[str], bool], report: Callable[[str], None]) -> Path:
    """List the files of a hub model, ask for consent, download them, and return their path."""
    from huggingface_hub import HfApi, snapshot_download

    with _one_line_errors(model):
        info = HfApi().model_info(model.repo, revision=model.revision or None, files_metadata=True)
    files = {sibling.rfilename: sibling for sibling in info.siblings or []}
    commit = str(info.sha)
    is_gguf = bool(model.quant) or not is_folder(files)
    if is_gguf:
        names = find_gguf_files(files, model)
    else:
        names = of_folder(files, _shards(model, commit) if WEIGHTS not in files else ())
    if unknown_files := [name for name in names if name not in files]:
        raise FileNotFoundError(f"model '{model}': {INDEX} names {unknown_files[0]!r}, which is not in the repository")
    missing = list(_missing(model, commit, [files[name] for name in names]))
    n_bytes = sum(sibling.size or 0 for sibling in missing)
    if missing:
        _require_disk_space(model, n_bytes)
        description = f"{model}: {len(missing)} of {len(names)} files of commit {commit}, {_format_bytes(n_bytes)}"
        if not consent(description):
            raise FileNotFoundError(f"model '{model}': not downloaded, because the answer was no")
    patterns = [glob.escape(name) for name in names]
    with _one_line_errors(model):
        folder = Path(snapshot_download(model.repo, revision=model.revision or "main", allow_patterns=patterns))
    report(f"{model}: commit {folder.name}")
    return folder / names[0] if is_gguf else folder


def _shards(model: Reference, commit: str) -> list[str]:
    """Download the index of the weights, and return the file names in it."""
    from huggingface_hub import hf_hub_download

    with _one_line_errors(model):
        index = hf_hub_download(model.repo, INDEX, revision=commit)
    try:
        return read_shard_names(Path(index))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise FileNotFoundError(f"model '{model}': {INDEX} does not name files of weights") from None


def _missing(model: Reference, commit: str, siblings: Iterable[Any]) -> Iterator[Any]:
    """Yield the files that are not in the cache."""
    cache = repository_folder(model.repo)
    for sibling in siblings:
        blob = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id or "none"
        if not (cache / "snapshots" / commit / sibling.rfilename).exists() and not (cache / "blobs" / blob).exists():
            yield sibling


def _require_disk_space(model: Reference, n_bytes: int) -> None:
    repository = repository_folder(model.repo)
    existing_folder = next(folder for folder in repository.parents if folder.exists())
    free = shutil.disk_usage(existing_folder).free
    if n_bytes > free:
        message = f"{model} needs {_format_bytes(n_bytes)}, {_format_bytes(free)} are free"
        raise OSError(errno.ENOSPC, f"{message}; set HF_HOME to a larger disk", str(existing_folder))


def _format_bytes(n_bytes: int) -> str:
    value, unit = (n_bytes / 1e9, "GB") if n_bytes >= 1e8 else (n_bytes / 1e6, "MB")
    return f"{value:.1f} {unit}"


@contextmanager
def _one_line_errors(model: Reference) -> Iterator[None]:
    """Convert errors of huggingface_hub to FileNotFoundError with one line."""
    from huggingface_hub import errors

    network_errors: tuple[type[BaseException], ...] = errors.HfHubHTTPError.__bases__  # HTTP library and OSError
    try:
        yield
    except errors.GatedRepoError:
        page = f"ask for access on the page of {model.repo}, then run: hf auth login"
        raise FileNotFoundError(f"model '{model}': the repository is gated; {page}") from None
    except errors.RevisionNotFoundError:
        message = f"{model.repo} has no revision {model.revision!r}; give a branch, a tag or a commit"
        raise FileNotFoundError(f"model '{model}': {message}") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        reason = "not on the Hugging Face hub, or private (for private models, run: hf auth login)"
        raise FileNotFoundError(f"{_not_found(model)}, not a built-in model, {reason}") from None
    except errors.OfflineModeIsEnabled:
        raise Unreachable(model, "HF_HUB_OFFLINE forbids a download", "unset HF_HUB_OFFLINE, or give a path") from None
    except (RuntimeError, *network_errors) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        detail = " ".join(str(error).split())[:200] or type(error).__name__
        raise Unreachable(model, f"the hub could not be reached ({detail})", "try again, or give a path") from None
