"""An adapter from whatever lies at a path: a PEFT directory or a LoRA GGUF file."""

from pathlib import Path

import numpy as np

from llorch.config import ModelConfig
from llorch.errors import FormatError
from llorch.files import Weights
from llorch.files.packed import has_codes
from llorch.lora.adapter import Adapter
from llorch.lora.base import BaseIdentity, remembered_identity, require_base, require_name
from llorch.lora.gguf_format import base_of_gguf, read_lora_gguf
from llorch.lora.peft_format import base_of_peft, copies_in_peft, read_peft

_BF16, _LEAST = 2.0**-8, 1e-7  # a copy may have been rounded to half the width


def read_adapter(path: str | Path, model: ModelConfig) -> Adapter:
    """Read a PEFT directory or a LoRA GGUF file, in float32; FormatError Unsupported for a lone safetensors file."""
    path = _existing(path)
    return read_peft(path, model) if path.is_dir() else read_lora_gguf(path, model)


def recorded_base(path: str | Path) -> BaseIdentity | str | None:
    """Read the base that an adapter records: llorch's record, a name, or None."""
    path = _existing(path)
    return base_of_peft(path) if path.is_dir() else base_of_gguf(path)


def check_base(path: str | Path, weights: Weights, *, any_base: bool = False) -> str:
    """Refuse (BaseMismatch) an adapter made for another base, as far as it records one; says what is known.

    Reads all of the base if the adapter records a digest and the base was not read before.
    """
    recorded = recorded_base(path)
    try:
        if isinstance(recorded, BaseIdentity):
            verdict = require_base(recorded, remembered_identity(weights), where=path)
        else:
            verdict = require_name(recorded, str(weights.path), where=path)
        _require_copies(Path(path), weights)
    except FormatError as error:
        if error.code != "BaseMismatch" or not any_base:
            raise
        return f"base: another base, accepted by --any-base; {error}"
    return verdict


def adapter_for(weights: Weights, adapter: Adapter | str | Path, *, any_base: bool) -> tuple[Adapter, str]:
    """Return an adapter that fits some weights, and one sentence about its base.

    If the adapter records its base, every tensor of the weights is read once. The base of an adapter in memory is
    unknown.
    """
    if isinstance(adapter, Adapter):
        return adapter, "base: unknown, because the adapter is not from a file"
    verdict = check_base(adapter, weights, any_base=any_base)
    return read_adapter(adapter, weights.config), verdict


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
