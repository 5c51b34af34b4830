"""Models in huggingface_hub's cache; this module makes no request.

Source: huggingface_hub, "Understand caching": below models--org--name/, refs/REVISION holds a commit and
snapshots/COMMIT its files.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llorch.files.hub.reference import Reference
from llorch.files.hub.required_files import CONFIG, INDEX, TOKENIZER, WEIGHTS, files_of_gguf, is_folder, shards_of


@dataclass(frozen=True)
class Cached:
    """A model in the cache.

    Attributes:
        path: Its GGUF file, or its folder.
        commit: Commit of the repository.
        whole: True if all is there; else a folder has weights, but others fetched it and left the tokenizer out.
    """

    path: Path
    commit: str
    whole: bool = True


def repository_folder(repo: str) -> Path:
    """Return the folder where the cache keeps a repository."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def look(wanted: Reference) -> Cached | None:
    """Find a model in the cache, at the commit that its revision was when it was last asked for."""
    home = repository_folder(wanted.repo)
    folder = home / "snapshots" / _commit(home, wanted.revision or "main")
    files = set(_files(folder))
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


def _files(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_file():  # a link to a blob that is gone is none
            yield path.relative_to(folder).as_posix()


def _weight_files(folder: Path) -> list[str]:
    """List the weight files that a folder needs, by its index; the index itself if it cannot be read."""
    if (folder / WEIGHTS).exists():
        return [WEIGHTS]
    try:
        return shards_of(folder / INDEX)
    except (ValueError, KeyError, TypeError, AttributeError):
        return [INDEX]  # what is wrong with it is said where it is opened
