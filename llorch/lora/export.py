"""Convert an adapter to the other file format, or to a PEFT directory that simpler readers support.

Source: vllm/lora/peft_helper.py; sglang issue 40835.
"""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llorch.families.config import ModelConfig
from llorch.files import open_weights
from llorch.files.new_file import folders_above, new_folder
from llorch.files.output_paths import check_target, size_of
from llorch.lora.adapter import Adapter, LoraTensors, checked
from llorch.lora.base import BaseIdentity, identity_of
from llorch.lora.config import LoraConfig, names_of
from llorch.lora.files import adapter_for, read_adapter, recorded_base
from llorch.lora.gguf_format import common_alpha, write_lora_gguf
from llorch.lora.peft_config import CONFIG_FILE
from llorch.lora.peft_format import BASE_FILE, OF_WHOLE, TENSOR_FILE, write_peft
from llorch.runtime.errors import FormatError


@dataclass(frozen=True, kw_only=True)
class Export:
    """Path, size and notes of a written adapter."""

    target: Path
    n_parameters: int
    n_bytes: int
    notes: list[str]


def export(
    base: str | Path,
    adapter: str | Path,
    target: str | Path,
    *,
    vllm_safe: bool = False,
    force: bool = False,
    any_base: bool = False,
) -> Export:
    """Write an adapter as a LoRA GGUF file if the target ends in .gguf, else as a PEFT directory.

    `vllm_safe` writes the result of `plain_adapter`. Raises FormatError BaseMismatch (unless `any_base`) or
    Unsupported, FileExistsError for an existing target (unless `force`), UserError for a target that contains a source.
    After an error the target does not exist.
    """
    base, adapter, target = Path(base), Path(adapter), Path(target)
    files = {CONFIG_FILE, TENSOR_FILE, BASE_FILE}
    check_target(base, adapter, target=target, force=force, what="an adapter", known=lambda file: file.name in files)
    with closing((weights := open_weights(base)).source):
        loaded, verdict = adapter_for(weights, adapter, any_base=any_base)
        recorded = recorded_base(adapter)
        identity = recorded if isinstance(recorded, BaseIdentity) else identity_of(weights)
    if vllm_safe:
        loaded = plain_adapter(loaded, weights.config)
    _write_adapter(loaded, target, weights.config, identity)
    read_adapter(target, weights.config)  # raises if the written files cannot be read
    notes = [verdict, *_notes(loaded, is_gguf=target.suffix == ".gguf")]
    return Export(target=target, n_parameters=loaded.n_parameters, n_bytes=size_of(target), notes=notes)


def _notes(adapter: Adapter, *, is_gguf: bool) -> list[str]:
    if not is_gguf:
        return [OF_WHOLE] if adapter.is_multimodal else []
    if common_alpha(adapter) is None:
        return ["the matrices have different scales: each scale is multiplied into lora_B, and alpha is left out"]
    return []


def _write_adapter(adapter: Adapter, target: Path, model: ModelConfig, base: BaseIdentity) -> None:
    with folders_above(target):
        if target.suffix == ".gguf":
            write_lora_gguf(adapter, target, model, base=base)
            return
        with new_folder(target) as folder:
            write_peft(adapter, folder, base=base)


def plain_adapter(adapter: Adapter, model: ModelConfig) -> Adapter:
    """Make an equivalent adapter without rank and alpha patterns.

    If one rank and one alpha suffice, the tensors stay. Else each scaling is multiplied into its B, and smaller ranks
    are padded with zeros. Servers support less than PEFT: vLLM has no alpha or rank patterns and no DoRA, SGLang no
    rank-stabilised scaling. FormatError Unsupported for DoRA and for `target_parameters`.
    """
    config = adapter.config
    if config.use_dora:
        raise FormatError("Unsupported", "vLLM and other engines do not support DoRA; merge instead: llorch lora merge")
    names = names_of(adapter.targets, model)
    if names["target_parameters"]:
        text = ", ".join(names["target_parameters"])
        raise FormatError("Unsupported", f"vLLM reads no target_parameters ({text}); merge instead: llorch lora merge")
    ranks = {config.rank_of(target) for target in adapter.targets.values()}
    if ranks == {config.r} and {adapter.scaling(name) for name in adapter.targets} == {config.lora_alpha / config.r}:
        simple_config = LoraConfig(r=config.r, lora_alpha=config.lora_alpha, **names)
        return checked(simple_config, adapter.tensors, model)
    rank = max(ranks)
    tensors = {name: _pad_and_scale(adapter.tensors[name], adapter.scaling(name), rank) for name in adapter.targets}
    return checked(LoraConfig(r=rank, lora_alpha=float(rank), **names), tensors, model)


def _pad_and_scale(tensors: LoraTensors, scaling: float, rank: int) -> LoraTensors:
    """Pad both factors with zeros to `rank`, and multiply lora_B by the scaling."""
    n_missing = rank - len(tensors.lora_A)
    scaled_B = (tensors.lora_B * np.float64(scaling)).astype(np.float32)
    return LoraTensors(np.pad(tensors.lora_A, ((0, n_missing), (0, 0))), np.pad(scaled_B, ((0, 0), (0, n_missing))))
