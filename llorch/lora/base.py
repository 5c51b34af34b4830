"""Which base an adapter was trained on: digests of its shapes and numbers, stored beside the adapter.

The numbers are digested as decoded float32 in the row order of Hugging Face, so a folder and a GGUF file of the same
model agree as long as no matrix was rounded. Norms and biases have a digest of their own: GGUF files keep them whole
also where the matrices are quantised. Hashing a large base takes longer than to answer: digests are remembered in the
user's cache.
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
from llorch.files.export import read_once
from llorch.files.new_file import new_file
from llorch.files.strict_json import read_json
from llorch.files.tensor_names import inventory
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields

_AT_ONCE = 4  # tensors that are read and hashed at the same time
_MAX_BYTES = 1 << 16  # of a remembered digest
_FORMAT = 1  # of what is hashed; another number forgets everything
_FLOATS = {"F64", "F32", "F16", "BF16"}  # types without codes
QUANTISATION_ERROR = "differs from the trained one by the quantisation error of the base"


class BaseStatus(NamedTuple):
    """Comparison of the base that an adapter records with a model."""

    kind: Literal["same", "named", "unknown", "another"]  # named: equal names, without a digest
    message: str


@dataclass(frozen=True, kw_only=True)
class BaseIdentity:
    """What can be said of a base without keeping it."""

    name: str  # or path, by which it was opened
    config: str  # SHA-256 of its family, shapes and constants
    vectors: str  # SHA-256 of its norms and biases
    matrices: str  # SHA-256 of all its matrices
    types: tuple[str, ...]  # in which the matrices were stored

    @property
    def digest(self) -> str:
        """One digest of all numbers and shapes; neither name nor stored type is in it."""
        return _sha256(f"{self.config} {self.vectors} {self.matrices}".encode())

    def has_vectors_of(self, other: "BaseIdentity") -> bool:
        """Tell if shapes, constants, norms and biases equal those of another base, as quantisation leaves them."""
        return (self.config, self.vectors) == (other.config, other.vectors)

    def to_json(self) -> str:
        """Write the record as one JSON object with sorted keys."""
        return json.dumps(asdict(self) | {"types": list(self.types)}, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_fields(cls, values: dict[str, object], path: Path) -> "BaseIdentity":
        """Read what `to_json` wrote; FormatError Missing or Malformed."""
        fields = Fields(values, path)
        digests = {key: fields.text(key) for key in ("config", "vectors", "matrices")}
        bad = [key for key, value in digests.items() if re.fullmatch("[0-9a-f]{64}", value) is None]
        types = values.get("types")
        if bad or not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
            message = f"{bad[0] if bad else 'types'}: expected 64 hexadecimal digits (types: a list)"
            raise FormatError("Malformed", message, path=path)
        return cls(name=fields.text("name"), types=tuple(types), **digests)


def identity_of(weights: Weights, name: str | None = None) -> BaseIdentity:
    """Digest a base; reads every tensor once, and refuses what is not finite."""
    # What states decay by is an exponential, which converters round one way and we another.
    rows = [row for name, row in sorted(inventory(weights.config).items()) if not name.endswith(".decay")]

    def digest(row) -> str:
        with read_once(weights, row) as array:
            return f"{row.name} {array.shape} " + _sha256(np.ascontiguousarray(array, "<f4").data)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        digests = dict(zip(rows, pool.map(digest, rows), strict=True))
    vectors, matrices = ([text for row, text in digests.items() if row.is_matrix is wide] for wide in (False, True))
    return BaseIdentity(
        name=name or str(weights.path),
        config=_sha256(_constants(weights.config).encode()),
        vectors=_sha256("\n".join(vectors).encode()),
        matrices=_sha256("\n".join(matrices).encode()),
        types=matrix_types(weights),
    )


def matrix_types(weights: Weights) -> tuple[str, ...]:
    """List the types in which a base stores its matrices, by name."""
    matrices = [row.name for row in inventory(weights.config).values() if row.is_matrix]
    return tuple(sorted({weights.stored_type(name).name for name in matrices}))


def quantised_types(types: Iterable[str]) -> list[str]:
    """Return those types that store codes with scales, so that they hold a base with a quantisation error."""
    return sorted({*types} - _FLOATS)


def types_differ(trained: Collection[str], here: Collection[str]) -> str:
    """Tell that one of two bases is quantised and the other is not, or in another way; empty where neither is."""
    if not quantised_types({*trained} ^ {*here}):
        return ""
    stored = f"its matrices are {', '.join(trained)} there and {', '.join(here)} here"
    return f"{stored}: the model {QUANTISATION_ERROR}"


def remembered_identity(weights: Weights) -> BaseIdentity:
    """Digest a base, or look up what that gave while its files were the same; raises as `identity_of`.

    A file is known by its inode, its size and the times of its last change, which the system keeps to the nanosecond.
    What cannot be read or written in the cache is no fault: the base is hashed then.
    """
    place = _cache_file(weights)
    try:
        known = BaseIdentity.from_fields(read_json(place, limit=_MAX_BYTES), place)
        return replace(known, name=str(weights.path))
    except (OSError, FormatError):
        identity = identity_of(weights)
    if place == _cache_file(weights):
        with suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            with new_file(place) as temporary:
                temporary.write_text(identity.to_json())
    return identity


def _cache_file(weights: Weights) -> Path:
    """Return the cache file of a base, named after its files and its configuration, which says how to read it."""
    key = json.dumps([_FORMAT, weights.source.fingerprint, repr(weights.config)])
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "llorch" / "bases" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def require_base(made_for: BaseIdentity, base: BaseIdentity, *, where: object) -> BaseStatus:
    """Refuse (BaseMismatch) an adapter made for another base; returns whether it is the same, or cannot be told."""
    if made_for.digest == base.digest:
        return BaseStatus("same", "the same numbers as in the training")
    parts = {"shapes and constants": "config", "norms and biases": "vectors"}
    differ = [text for text, key in parts.items() if getattr(made_for, key) != getattr(base, key)]
    if not differ and made_for.types != base.types:
        stored = f"its matrices are {', '.join(made_for.types)} there and {', '.join(base.types)} here"
        stored = types_differ(made_for.types, base.types) or stored
        return BaseStatus("unknown", f"unknown: norms and shapes equal {made_for.name}, but {stored}")
    what = differ[0] if differ else "matrices"
    message = f"expected the base {made_for.name}, got other {what} in {base.name}; give the base of the training"
    raise FormatError("BaseMismatch", message, path=str(where))


def require_name(made_for: str | None, base: str, *, where: object, stored: str = "") -> BaseStatus:
    """Refuse (BaseMismatch) a base whose name ends differently; `stored` is what `types_differ` tells."""
    if not made_for:
        return BaseStatus("unknown", "unknown, because the adapter does not name its base")
    if _name_end(made_for) == _name_end(base):
        if stored:
            return BaseStatus("unknown", f"unknown: the name {made_for} fits, but {stored}")
        return BaseStatus("named", f"the name {made_for} fits; the adapter has no digest to check")
    message = f"expected the base {made_for} (by name, there is no digest), got {base}{', and ' * bool(stored)}{stored}"
    remedy = "if both are one model, add --any-base (any_base=True)"
    raise FormatError("BaseMismatch", f"{message}; {remedy}", path=str(where))


def _constants(config: ModelConfig) -> str:
    """Write down the constants that both formats store alike: neither the form of the RoPE scaling nor the context."""
    shapes = {name: weight.shape for name, weight in inventory(config).items()}
    floats = [str(np.float32(value)) for value in (config.rms_norm_eps, config.rope_theta)]
    heads = [config.n_heads, config.n_kv_heads, config.head_dim]
    return json.dumps([FAMILIES[config.family].gguf, heads, floats, sorted((k, list(v)) for k, v in shapes.items())])


def _name_end(name: str) -> str:
    """Reduce a name or path to its end, without the parts that copies and downloads change."""
    cached = re.search(r"models--([^/]+)/snapshots/", name)
    end = cached[1].rpartition("--")[2] if cached else re.split(r"[/\\]", name.rstrip("/\\"))[-1]
    return re.sub("[^a-z0-9]", "", end.lower().removesuffix(".gguf"))


def _sha256(data) -> str:
    return hashlib.sha256(data).hexdigest()
