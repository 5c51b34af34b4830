"""Fetch a model of the hub: look into huggingface_hub's cache, then list the missing files, check sizes and disk space.

huggingface_hub downloads them. llorch downloads only the files of the model from a repository. Errors of the hub and of
the network become one line. `look` makes no request.

Source: huggingface_hub, "Understand caching": below models--org--name/, refs/REVISION holds a commit and
snapshots/COMMIT its files.
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
    files_of_gguf,
    is_folder,
    of_folder,
    shards_of,
)
from llorch.runtime.errors import MissingExtra


@dataclass(frozen=True)
class Cached:
    """A model in the cache."""

    path: Path  # its GGUF file, or its folder
    commit: str  # of the repository
    whole: bool = True  # else a folder has weights, but others fetched it and left the tokenizer out


def repository_folder(repo: str) -> Path:
    """Return the folder where the cache keeps a repository."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def look(wanted: Reference) -> Cached | None:
    """Find a model in the cache, at the commit that its revision was when it was last asked for."""
    home = repository_folder(wanted.repo)
    folder = home / "snapshots" / _commit(home, wanted.revision or "main")
    # A link to a blob that is gone is no file.
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if not wanted.quant and is_folder(files):
        complete = all((folder / name).exists() for name in _weight_files(folder))
        whole = all((folder / name).exists() for name in (CONFIG, *TOKENIZER))
        return Cached(folder, folder.name, whole) if complete else None
    try:
        return Cached(folder / files_of_gguf(files, wanted)[0], folder.name)
    except FileNotFoundError:
        return None


def _commit(home: Path, revision: str) -> str:
    """Return the commit that a revision was when it was last downloaded, "none" if it never was."""
    if re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    ref = home / "refs" / revision
    return ref.read_text().strip() if ref.is_file() else "none"


def _weight_files(folder: Path) -> list[str]:
    """List the weight files that a folder needs, by its index; the index itself if it cannot be read."""
    if (folder / WEIGHTS).exists():
        return [WEIGHTS]
    try:
        return shards_of(folder / INDEX)
    except (ValueError, KeyError, TypeError, AttributeError):
        return [INDEX]  # what is wrong with it is said where it is opened


def obtain(wanted: Reference, *, consent: Callable[[str], bool], report: Callable[[str], None]) -> Path:
    """Return the path of a model of the hub, from the cache or else downloaded; see `llorch.files.hub.find`."""
    try:
        import huggingface_hub  # noqa: F401
    except ModuleNotFoundError:
        missing = MissingExtra("hub", "huggingface_hub")
        raise FileNotFoundError(f"{_neither(wanted)}; to search the Hugging Face hub: {missing}") from None
    with _in_words(wanted):
        cached = look(wanted)
    if cached is None or not cached.whole:
        try:
            return _fetched(wanted, consent, report)
        except Unreachable as error:
            if cached is None:
                raise
            report(f"{wanted}: {error.why}; the cached copy has no tokenizer")
    report(f"{wanted}: commit {cached.commit}, from the cache")
    return cached.path


class Unreachable(FileNotFoundError):
    """Nobody could be asked."""

    def __init__(self, wanted: Reference, why: str, remedy: str) -> None:
        """Name the model, the reason why the hub cannot be asked (`why`), and what to do."""
        super().__init__(f"{_neither(wanted)}, not in the cache of the Hugging Face hub, and {why}; {remedy}")
        self.why = why


def _neither(wanted: Reference) -> str:
    return f"model '{wanted}': no such file or folder"


def _fetched(wanted: Reference, consent: Callable[[str], bool], report: Callable[[str], None]) -> Path:
    """Choose the files of a hub model, ask for consent, download them, and return their path."""
    from huggingface_hub import HfApi, snapshot_download

    with _in_words(wanted):
        found = HfApi().model_info(wanted.repo, revision=wanted.revision or None, files_metadata=True)
    files = {sibling.rfilename: sibling for sibling in found.siblings or []}
    commit = str(found.sha)
    is_gguf = bool(wanted.quant) or not is_folder(files)
    if is_gguf:
        names = files_of_gguf(files, wanted)
    else:
        names = of_folder(files, _shards(wanted, commit) if WEIGHTS not in files else ())
    if absent := [name for name in names if name not in files]:
        raise FileNotFoundError(f"model '{wanted}': {INDEX} names {absent[0]!r}, which is not in the repository")
    missing = list(_missing(wanted, commit, [files[name] for name in names]))
    n_bytes = sum(sibling.size or 0 for sibling in missing)
    if missing:
        _require_room(wanted, n_bytes)
        described = f"{wanted}: {len(missing)} of {len(names)} files of commit {commit}, {_format_bytes(n_bytes)}"
        if not consent(described):
            raise FileNotFoundError(f"model '{wanted}': not downloaded, because the answer was no")
    patterns = [glob.escape(name) for name in names]
    with _in_words(wanted):
        folder = Path(snapshot_download(wanted.repo, revision=wanted.revision or "main", allow_patterns=patterns))
    report(f"{wanted}: commit {folder.name}")
    return folder / names[0] if is_gguf else folder


def _shards(wanted: Reference, commit: str) -> list[str]:
    """Download the index of the weights, and list the files that it names."""
    from huggingface_hub import hf_hub_download

    with _in_words(wanted):
        index = hf_hub_download(wanted.repo, INDEX, revision=commit)
    try:
        return shards_of(Path(index))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise FileNotFoundError(f"model '{wanted}': {INDEX} does not name files of weights") from None


def _missing(wanted: Reference, commit: str, siblings: Iterable[Any]) -> Iterator[Any]:
    """Yield the files whose bytes the cache does not have."""
    home = repository_folder(wanted.repo)
    for sibling in siblings:
        blob = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id or "none"
        if not (home / "snapshots" / commit / sibling.rfilename).exists() and not (home / "blobs" / blob).exists():
            yield sibling


def _require_room(wanted: Reference, n_bytes: int) -> None:
    home = repository_folder(wanted.repo)
    place = next(folder for folder in home.parents if folder.exists())
    free = shutil.disk_usage(place).free
    if n_bytes > free:
        message = f"{wanted} needs {_format_bytes(n_bytes)}, {_format_bytes(free)} are free"
        raise OSError(errno.ENOSPC, f"{message}; set HF_HOME to a larger disk", str(place))


def _format_bytes(n_bytes: int) -> str:
    value, unit = (n_bytes / 1e9, "GB") if n_bytes >= 1e8 else (n_bytes / 1e6, "MB")
    return f"{value:.1f} {unit}"


@contextmanager
def _in_words(wanted: Reference) -> Iterator[None]:
    """Turn what huggingface_hub raises into FileNotFoundError, in a line."""
    from huggingface_hub import errors

    of_the_way: tuple[type[BaseException], ...] = errors.HfHubHTTPError.__bases__  # of its HTTP library, OSError
    try:
        yield
    except errors.GatedRepoError:
        page = f"ask for access on the page of {wanted.repo}, then run: hf auth login"
        raise FileNotFoundError(f"model '{wanted}': the repository is gated; {page}") from None
    except errors.RevisionNotFoundError:
        message = f"{wanted.repo} has no revision {wanted.revision!r}; give a branch, a tag or a commit"
        raise FileNotFoundError(f"model '{wanted}': {message}") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        known = "not on the Hugging Face hub, or private (for private models, run: hf auth login)"
        raise FileNotFoundError(f"{_neither(wanted)}, not a built-in model, {known}") from None
    except errors.OfflineModeIsEnabled:
        raise Unreachable(wanted, "HF_HUB_OFFLINE forbids a download", "unset HF_HUB_OFFLINE, or give a path") from None
    except (RuntimeError, *of_the_way) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise Unreachable(wanted, f"the hub could not be reached ({said})", "try again, or give a path") from None
