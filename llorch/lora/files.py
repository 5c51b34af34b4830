"""Read an adapter from a path, a PEFT directory or a LoRA GGUF file, and check its base."""

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
    cached_identity,
    describe_types,
    matrix_types,
    quantised_types,
    require_base,
    require_name,
)
from llorch.lora.gguf_format import read_gguf_base, read_lora_gguf
from llorch.lora.peft_format import read_peft, read_peft_base, read_peft_copies
from llorch.runtime.errors import FormatError

# Relative and absolute tolerance of a copy of a base matrix, which may have been rounded to bfloat16 (8 bits).
_BF16, _LEAST = 2.0**-8, 1e-7


def read_adapter(path: str | Path, model: ModelConfig) -> Adapter:
    """Read a PEFT directory or a LoRA GGUF file, in float32; FormatError Unsupported for a lone safetensors file."""
    path = _existing(path)
    return read_peft(path, model) if path.is_dir() else read_lora_gguf(path, model)


def recorded_base(path: str | Path) -> BaseIdentity | str | None:
    """Read the recorded base of an adapter: llorch's record, a name, or None."""
    path = _existing(path)
    return read_peft_base(path) if path.is_dir() else read_gguf_base(path)


def check_base(path: str | Path, weights: Weights, *, any_base: bool = False) -> BaseStatus:
    """Refuse (FormatError BaseMismatch) an adapter whose recorded base is another model; `any_base` accepts it.

    If the adapter records digests and the base's are not cached, read all of the base.
    """
    recorded = recorded_base(path)
    try:
        if isinstance(recorded, BaseIdentity):
            status = require_base(recorded, cached_identity(weights), where=path)
        else:
            trained = _trained_base(recorded, weights)
            note = "" if trained is None else describe_types(matrix_types(trained), matrix_types(weights))
            status = require_name(recorded, str(weights.path), where=path, note=note)
        _require_copies(Path(path), weights)
    except FormatError as error:
        if error.code != "BaseMismatch" or not any_base:
            raise
        return BaseStatus("another", f"another base, accepted by --any-base; {error}")
    return status


def _trained_base(recorded: BaseIdentity | str | None, weights: Weights) -> Weights | None:
    """Open the recorded base of an adapter if it is on this machine or in the hub's cache; else return None.

    If the adapter records only a name, the base must have the shapes of `weights`.
    """
    name = recorded.name if isinstance(recorded, BaseIdentity) else recorded or ""
    path = Path(name)
    if not name or not path.exists():
        reference = Reference.parse(name)
        cached = look(reference) if reference is not None and find_spec("huggingface_hub") is not None else None
        if cached is None:
            return None
        path = cached.path
    try:
        trained = open_weights(path)
    except (FormatError, OSError):
        return None
    if isinstance(recorded, BaseIdentity):
        return trained if cached_identity(trained).digest == recorded.digest else None
    return trained if inventory(trained.config) == inventory(weights.config) else None


def check_merge(path: str | Path, weights: Weights, *, any_base: bool) -> list[str]:
    """Refuse (FormatError BaseMismatch) to merge into a base that is quantised differently than in the training.

    The merged model would differ from the trained one. With `any_base`, return a note instead. Return no note if there
    is nothing to refuse, also if both decode to equal numbers.
    """
    recorded = recorded_base(path)
    trained = _trained_base(recorded, weights)
    if isinstance(recorded, BaseIdentity):
        name, types, identity = recorded.name, recorded.types, cached_identity(weights)
        is_copy = recorded.has_vectors_of(identity) and recorded.digest != identity.digest
    else:
        name, types, is_copy = recorded, () if trained is None else matrix_types(trained), trained is not None
    base_types = matrix_types(weights)
    if not (is_copy and quantised_types(types) and describe_types(types, base_types)):
        return []
    size_note = ""
    if trained is not None:
        if not (difference := _relative_difference(trained, weights)):
            return []  # equal after decoding
        size_note = f" ({difference:.2%} of the norm of its matrices)"
    message = f"the merged model {QUANTISATION_ERROR}{size_note}: the matrices of {name}, the base of the training, are"
    message += f" {', '.join(types)}, those of {weights.path} {', '.join(base_types)}"
    if any_base:
        return [message]
    remedy = "give the base of the training, or accept the difference with --any-base (any_base=True)"
    raise FormatError("BaseMismatch", f"{message}; {remedy}", path=path)


def _relative_difference(trained: Weights, weights: Weights) -> float:
    """Return the norm of the difference of all matrices, relative to the norm of `trained`'s."""
    squares = np.zeros(2)
    for name, record in inventory(weights.config).items():
        if record.is_matrix:
            matrix = trained.read(name).astype(np.float64)
            squares += np.square(weights.read(name) - matrix).sum(), np.square(matrix).sum()
    return float(np.sqrt(squares[0] / squares[1]))


def adapter_for(weights: Weights, adapter: Adapter | str | Path, *, any_base: bool) -> tuple[Adapter, str]:
    """Return an adapter for a base and one sentence about its recorded base; errors as `check_base`, `read_adapter`."""
    if isinstance(adapter, Adapter):
        return adapter, "base: unknown, because the adapter is not from a file"
    status = check_base(adapter, weights, any_base=any_base)
    return read_adapter(adapter, weights.config), f"base: {status.message}"


def _require_copies(path: Path, weights: Weights) -> None:
    """Refuse a copy of embedding or output in the adapter's files that differs from the base's: it was trained."""
    for name, copy in (read_peft_copies(path, weights.config) if path.is_dir() else {}).items():
        base_name = name if name in weights else "embed_tokens"  # tied output
        if has_codes(weights.stored_type(base_name)):
            continue  # the base is quantised, so a difference proves nothing
        base = weights.read(base_name)
        differ = np.abs(base - copy) > np.abs(base) * _BF16 + _LEAST
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
