"""An adapter from whatever lies at a path: a PEFT directory or a LoRA GGUF file."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from llorch.families.config import ModelConfig
from llorch.files import Weights, open_weights
from llorch.files.hub.fetch import look
from llorch.files.hub.reference import Reference
from llorch.files.packed import has_codes
from llorch.files.tensor_names import inventory
from llorch.lora.adapter import Adapter
from llorch.lora.base import (
    QUANTISATION_ERROR,
    BaseIdentity,
    BaseStatus,
    matrix_types,
    quantised_types,
    remembered_identity,
    require_base,
    require_name,
    types_differ,
)
from llorch.lora.gguf_format import base_of_gguf, read_lora_gguf
from llorch.lora.peft_format import base_of_peft, copies_in_peft, read_peft
from llorch.runtime.errors import FormatError

_BF16, _LEAST = 2.0**-8, 1e-7  # a copy may have been rounded to half the width


def read_adapter(path: str | Path, model: ModelConfig) -> Adapter:
    """Read a PEFT directory or a LoRA GGUF file, in float32; FormatError Unsupported for a lone safetensors file."""
    path = _existing(path)
    return read_peft(path, model) if path.is_dir() else read_lora_gguf(path, model)


def recorded_base(path: str | Path) -> BaseIdentity | str | None:
    """Read the base that an adapter records: llorch's record, a name, or None."""
    path = _existing(path)
    return base_of_peft(path) if path.is_dir() else base_of_gguf(path)


def check_base(path: str | Path, weights: Weights, *, any_base: bool = False) -> BaseStatus:
    """Refuse (BaseMismatch) an adapter made for another base, as far as it records one.

    Reads all of the base if the adapter records a digest and the base was not read before.
    """
    recorded = recorded_base(path)
    try:
        if isinstance(recorded, BaseIdentity):
            status = require_base(recorded, remembered_identity(weights), where=path)
        else:
            trained = _trained_base(recorded, weights)
            stored = "" if trained is None else types_differ(matrix_types(trained), matrix_types(weights))
            status = require_name(recorded, str(weights.path), where=path, stored=stored)
        _require_copies(Path(path), weights)
    except FormatError as error:
        if error.code != "BaseMismatch" or not any_base:
            raise
        return BaseStatus("another", f"another base, accepted by --any-base; {error}")
    return status


def _trained_base(recorded: BaseIdentity | str | None, weights: Weights) -> Weights | None:
    """Open the base that an adapter records if it is on this machine, also in the cache of the hub; else None.

    A base of which the adapter records only the name must have the shapes of `weights`.
    """
    name = recorded.name if isinstance(recorded, BaseIdentity) else recorded or ""
    place = Path(name)
    if not name or not place.exists():
        reference = Reference.parse(name)
        cached = look(reference) if reference is not None and find_spec("huggingface_hub") is not None else None
        if cached is None:
            return None
        place = cached.path
    try:
        trained = open_weights(place)
    except (FormatError, OSError):
        return None
    if isinstance(recorded, BaseIdentity):
        return trained if remembered_identity(trained).digest == recorded.digest else None
    return trained if inventory(trained.config) == inventory(weights.config) else None


def check_merge(path: str | Path, weights: Weights, *, any_base: bool) -> list[str]:
    """Refuse (BaseMismatch) to merge an adapter that was trained on a quantised base into another base.

    The merged model is not the trained one then. `any_base` accepts it; returned is a note.
    """
    recorded = recorded_base(path)
    trained = _trained_base(recorded, weights)
    if isinstance(recorded, BaseIdentity):
        name, types, identity = recorded.name, recorded.types, remembered_identity(weights)
        is_copy = recorded.has_vectors_of(identity) and recorded.digest != identity.digest
    else:
        name, types, is_copy = recorded, () if trained is None else matrix_types(trained), trained is not None
    here = matrix_types(weights)
    if not (is_copy and quantised_types(types) and types_differ(types, here)):
        return []
    size = ""
    if trained is not None:
        if not (difference := _relative_difference(trained, weights)):
            return []  # the decoded numbers
        size = f" ({difference:.2%} of the norm of its matrices)"
    message = f"the merged model {QUANTISATION_ERROR}{size}: the matrices of {name}, the base of the training, are"
    message += f" {', '.join(types)}, those of {weights.path} {', '.join(here)}"
    if any_base:
        return [message]
    remedy = "give the base of the training, or accept the difference with --any-base (any_base=True)"
    raise FormatError("BaseMismatch", f"{message}; {remedy}", path=path)


def _relative_difference(trained: Weights, weights: Weights) -> float:
    """Return the norm of the difference of all matrices of two bases of one shape, relative to the first."""
    squares = np.zeros(2)
    for name, row in inventory(weights.config).items():
        if row.is_matrix:
            matrix = trained.read(name).astype(np.float64)
            squares += np.square(weights.read(name) - matrix).sum(), np.square(matrix).sum()
    return float(np.sqrt(squares[0] / squares[1]))


def adapter_for(weights: Weights, adapter: Adapter | str | Path, *, any_base: bool) -> tuple[Adapter, str]:
    """Return an adapter that fits some weights, and one sentence about its base, as `check_base` and `read_adapter`."""
    if isinstance(adapter, Adapter):
        return adapter, "base: unknown, because the adapter is not from a file"
    status = check_base(adapter, weights, any_base=any_base)
    return read_adapter(adapter, weights.config), f"base: {status.message}"


def _require_copies(path: Path, weights: Weights) -> None:
    """Refuse an embedding or output beside its adapter that has other numbers than the base: trained or resized."""
    for name, copy in (copies_in_peft(path, weights.config) if path.is_dir() else {}).items():
        stored = name if name in weights else "embed_tokens"
        if has_codes(weights.stored_type(stored)):
            continue  # rounded here, so other numbers say nothing
        own = weights.read(stored)
        differ = np.abs(own - copy) > np.abs(own) * _BF16 + _LEAST
        if differ.any():
            message = f"expected its copy of {name} to equal {weights.path}, got {differ.mean():.1%} other numbers"
            raise FormatError("BaseMismatch", message, path=path)


def _existing(path: str | Path) -> Path:
    """Return the path of an adapter; FileNotFoundError if there is none, FormatError for a lone .safetensors file."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such adapter; give a PEFT directory or a LoRA GGUF file")
    if path.suffix == ".safetensors":
        raise FormatError("Unsupported", "give the folder that holds adapter_config.json, not the file", path=path)
    return path
