"""Identify the base (model) of an adapter: digests of its shapes and numbers, stored with the adapter.

Digests are computed from decoded float32 values in Hugging Face row order, so a folder and a GGUF file of one model
agree if no matrix was rounded. Norms and biases have a separate digest: GGUF files with quantised matrices store them
exactly. Hashing a large base is slow, so digests are cached in the user's cache folder.
"""

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from llorch.families.config import ModelConfig
from llorch.families.table import FAMILIES
from llorch.files import Weights
from llorch.files.export import weight_in_memory
from llorch.files.new_file import new_file
from llorch.files.strict_json import read_json
from llorch.files.tensor_names import inventory
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields

_AT_ONCE = 4  # tensors read and hashed in parallel
_MAX_BYTES = 1 << 16  # size limit of a cache file; a record is far smaller
_FORMAT = 1  # version of the hashed content; a new number invalidates the cache
_FLOATS = {"F64", "F32", "F16", "BF16"}  # types without codes
QUANTISATION_ERROR = "differs from the trained one by the quantisation error of the base"


class BaseStatus(NamedTuple):
    """Comparison of an adapter's recorded base with a model."""

    kind: Literal["same", "named", "unknown", "another"]  # named: equal names, without a digest to compare
    message: str


@dataclass(frozen=True, kw_only=True)
class BaseIdentity:
    """Name, digests and stored types of a base."""

    name: str  # name or path
    config: str  # SHA-256 of family, shapes and constants such as the number of heads
    vectors: str  # SHA-256 of norms and biases
    matrices: str  # SHA-256 of all matrices
    types: tuple[str, ...]  # stored types of the matrices

    @property
    def digest(self) -> str:
        """Digest of all numbers and shapes, without name and stored types."""
        return _sha256(f"{self.config} {self.vectors} {self.matrices}".encode())

    def has_vectors_of(self, base: "BaseIdentity") -> bool:
        """Tell if shapes, constants, norms and biases equal another base's; quantisation does not change them."""
        return (self.config, self.vectors) == (base.config, base.vectors)

    def to_json(self) -> str:
        """Write the record as one JSON object with sorted keys."""
        return json.dumps(asdict(self) | {"types": list(self.types)}, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_fields(cls, values: dict[str, object], path: Path) -> "BaseIdentity":
        """Read a record written by `to_json`; FormatError Missing or Malformed."""
        fields = Fields(values, path)
        digests = {key: fields.text(key) for key in ("config", "vectors", "matrices")}
        bad = [key for key, value in digests.items() if re.fullmatch("[0-9a-f]{64}", value) is None]
        types = values.get("types")
        if bad or not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
            message = f"{bad[0] if bad else 'types'}: expected 64 hexadecimal digits (types: a list)"
            raise FormatError("Malformed", message, path=path)
        return cls(name=fields.text("name"), types=tuple(types), **digests)


def identity_of(weights: Weights, name: str | None = None) -> BaseIdentity:
    """Compute the digests of a base; read every tensor once, and refuse numbers that are not finite."""
    # The decay of states is an exponential, which converters round differently than llorch.
    records = [record for name, record in sorted(inventory(weights.config).items()) if not name.endswith(".decay")]

    def digest(record) -> str:
        with weight_in_memory(weights, record) as array:
            return f"{record.name} {array.shape} " + _sha256(np.ascontiguousarray(array, "<f4").data)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        digests = dict(zip(records, pool.map(digest, records), strict=True))
    vectors, matrices = ([text for r, text in digests.items() if r.is_matrix is flag] for flag in (False, True))
    return BaseIdentity(
        name=name or str(weights.path),
        config=_sha256(_serialise_constants(weights.config).encode()),
        vectors=_sha256("\n".join(vectors).encode()),
        matrices=_sha256("\n".join(matrices).encode()),
        types=matrix_types(weights),
    )


def matrix_types(weights: Weights) -> tuple[str, ...]:
    """List the stored types of a base's matrices, sorted by name."""
    matrices = [record.name for record in inventory(weights.config).values() if record.is_matrix]
    return tuple(sorted({weights.stored_type(name).name for name in matrices}))


def quantised_types(types: Iterable[str]) -> list[str]:
    """Select the types that store codes with scales, and so have a quantisation error."""
    return sorted({*types} - _FLOATS)


def describe_types(trained: Collection[str], actual: Collection[str]) -> str:
    """Describe how the quantisation of two bases differs, by types of their matrices; empty if it does not."""
    if not quantised_types({*trained} ^ {*actual}):
        return ""
    difference = f"its matrices are {', '.join(trained)} there and {', '.join(actual)} here"
    return f"{difference}: the model {QUANTISATION_ERROR}"


def cached_identity(weights: Weights) -> BaseIdentity:
    """Compute the digests of a base, or take them from the cache if its files did not change; errors as `identity_of`.

    A file is identified by its inode, size and times of last change in nanoseconds. If the cache cannot be read or
    written, the base is hashed without it.
    """
    path = _cache_file(weights)
    try:
        cached = BaseIdentity.from_fields(read_json(path, limit=_MAX_BYTES), path)
        return replace(cached, name=str(weights.path))
    except (OSError, FormatError):
        identity = identity_of(weights)
    if path == _cache_file(weights):  # the files did not change while they were hashed
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with new_file(path) as temporary:
                temporary.write_text(identity.to_json())
    return identity


def _cache_file(weights: Weights) -> Path:
    """Return the cache file of a base, named after its files and its configuration."""
    key = json.dumps([_FORMAT, weights.source.fingerprint, repr(weights.config)])
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "llorch" / "bases" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def require_base(made_for: BaseIdentity, base: BaseIdentity, *, where: object) -> BaseStatus:
    """Refuse (FormatError BaseMismatch) an adapter made for another base; "unknown": quantisation may explain it."""
    if made_for.digest == base.digest:
        return BaseStatus("same", "the same numbers as in the training")
    parts = {"shapes and constants": "config", "norms and biases": "vectors"}
    differences = [text for text, key in parts.items() if getattr(made_for, key) != getattr(base, key)]
    if not differences and made_for.types != base.types:
        stored_types = f"its matrices are {', '.join(made_for.types)} there and {', '.join(base.types)} here"
        stored_types = describe_types(made_for.types, base.types) or stored_types
        return BaseStatus("unknown", f"unknown: norms and shapes equal {made_for.name}, but {stored_types}")
    difference = differences[0] if differences else "matrices"
    message = f"expected the base {made_for.name}, got other {difference} in {base.name}; give the base of the training"
    raise FormatError("BaseMismatch", message, path=str(where))


def require_name(made_for: str | None, base: str, *, where: object, note: str = "") -> BaseStatus:
    """Refuse (FormatError BaseMismatch) a base with another last path component; `note`: from `describe_types`."""
    if not made_for:
        return BaseStatus("unknown", "unknown, because the adapter does not name its base")
    if _name_end(made_for) == _name_end(base):
        if note:
            return BaseStatus("unknown", f"unknown: the name {made_for} fits, but {note}")
        return BaseStatus("named", f"the name {made_for} fits; the adapter has no digest to check")
    message = f"expected the base {made_for} (by name, there is no digest), got {base}{', and ' * bool(note)}{note}"
    remedy = "if both are one model, add --any-base (any_base=True)"
    raise FormatError("BaseMismatch", f"{message}; {remedy}", path=str(where))


def _serialise_constants(config: ModelConfig) -> str:
    """Serialise the constants that folders and GGUF files store equally; RoPE scaling and context length may differ."""
    shapes = {name: weight.shape for name, weight in inventory(config).items()}
    floats = [str(np.float32(value)) for value in (config.rms_norm_eps, config.rope_theta)]
    heads = [config.n_heads, config.n_kv_heads, config.head_dim]
    return json.dumps([FAMILIES[config.family].gguf, heads, floats, sorted((k, list(v)) for k, v in shapes.items())])


def _name_end(name: str) -> str:
    """Return the last component of a name or path in lower case, without what downloads and file formats change."""
    cached = re.search(r"models--([^/]+)/snapshots/", name)
    end = cached[1].rpartition("--")[2] if cached else re.split(r"[/\\]", name.rstrip("/\\"))[-1]
    return re.sub("[^a-z0-9]", "", end.lower().removesuffix(".gguf"))


def _sha256(data) -> str:
    return hashlib.sha256(data).hexdigest()
