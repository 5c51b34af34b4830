"""The same adapter with one rank, one alpha and no patterns: what every reader of PEFT directories understands.

Servers read less than PEFT writes: vLLM reads neither alpha nor rank patterns, SGLang no rank-stabilised scale. Here
each scale is multiplied into its B, and smaller ranks are filled up with zeros, so that alpha / r is 1 for all.

Source: vllm/lora/peft_helper.py; sglang issue 40835.
"""

from collections.abc import Mapping

import numpy as np

from llorch.config import ModelConfig
from llorch.errors import FormatError
from llorch.lora.adapter import Adapter, LoraTensors, checked
from llorch.lora.config import LoraConfig
from llorch.lora.targets import Target


def plain_adapter(adapter: Adapter, model: ModelConfig) -> Adapter:
    """An equal adapter of one rank whose every scale is 1; the same where one rank and alpha suffice already.

    Unsupported for DoRA, which such readers do not have.
    """
    config = adapter.config
    if config.use_dora:
        raise FormatError("Unsupported", "vLLM and others have no DoRA; merge instead: llorch lora merge")
    names = module_names(adapter.targets, model)
    ranks = {config.rank_of(target) for target in adapter.targets.values()}
    if ranks == {config.r} and {adapter.scaling(name) for name in adapter.targets} == {config.lora_alpha / config.r}:
        kept = LoraConfig(r=config.r, lora_alpha=config.lora_alpha, target_modules=names)
        return checked(kept, adapter.tensors, model)
    rank = max(ranks)
    tensors = {name: _filled(adapter.tensors[name], adapter.scaling(name), rank) for name in adapter.targets}
    return checked(LoraConfig(r=rank, lora_alpha=float(rank), target_modules=names), tensors, model)


def module_names(targets: Mapping[str, Target], model: ModelConfig) -> tuple[str, ...]:
    """Name the matrices of an adapter: ends of paths where every layer has the same ones, else whole paths; sorted."""
    ends = tuple(sorted({target.path.rpartition(".")[2] for target in targets.values()}))
    same = LoraConfig(target_modules=ends).targets(model).keys() == targets.keys()
    return ends if same else tuple(sorted(target.path for target in targets.values()))


def _filled(tensors: LoraTensors, scaling: float, rank: int) -> LoraTensors:
    more = rank - len(tensors.lora_A)
    scaled = (tensors.lora_B * np.float64(scaling)).astype(np.float32)
    return LoraTensors(np.pad(tensors.lora_A, ((0, more), (0, 0))), np.pad(scaled, ((0, 0), (0, more))))
