"""Digests of bases that were made before, kept in the user's cache: hashing a large base takes longer than to answer.

A file is known by its inode, its size and the times of its last change, which the system keeps to the nanosecond. What
cannot be read or written here is no fault: the base is hashed then.
"""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from llorch.errors import FormatError
from llorch.files import Weights
from llorch.files.strict_json import read_json
from llorch.lora.base import BaseIdentity, identity_of

_MAX_BYTES = 1 << 16
_FORMAT = 1  # of what is hashed; another number forgets everything


def remembered_identity(weights: Weights) -> BaseIdentity:
    """Digest a base, or look up what that gave while its files were the same; raises as `identity_of`."""
    place = _place(weights)
    try:
        known = BaseIdentity.from_fields(read_json(place, limit=_MAX_BYTES), place)
        return replace(known, name=str(weights.path))
    except (OSError, FormatError):
        identity = identity_of(weights)
    if place == _place(weights):
        _write(place, identity.to_json())
    return identity


def _place(weights: Weights) -> Path:
    """The file for a base as it lies on the disk, with its configuration, which says how to read it."""
    key = json.dumps([_FORMAT, weights.source.fingerprint, repr(weights.config)])
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "llorch" / "bases" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def _write(place: Path, text: str) -> None:
    temporary = place.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(text)
            temporary.replace(place)
        finally:
            temporary.unlink(missing_ok=True)
