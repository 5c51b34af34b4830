"""Adapters on random models of the families that are not dense, beside everything that PEFT trains there."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from builders.random_adapters import random_adapter
from llorch.families.config import ModelConfig
from llorch.lora.adapter import Adapter
from llorch.lora.config import names_of
from llorch.lora.peft_format import has_multimodal_names
from llorch.lora.targets import targets_of


def every_target(config: ModelConfig) -> dict[str, Any]:
    """Settings of `LoraConfig` that name every matrix of the layers."""
    inner = {name: t for name, t in targets_of(config).items() if name not in ("embed_tokens", "lm_head")}
    return dict(names_of(inner, config))


def family_adapter(config: ModelConfig, *, seed: int = 0, **settings: Any) -> Adapter:
    """Random numbers beside every matrix of the layers; ranks and scales differ."""
    ranks = {"v_proj": 2, "experts.down_proj": 4, "gate_up_proj": 2, "in_proj_qkvz": 5, "q_proj": 1}
    alphas = {"gate_up_proj": 2.0, "o_proj": 7.0}
    chosen = {"rank_pattern": ranks, "alpha_pattern": alphas} | every_target(config) | settings
    return random_adapter(config, seed=seed, **chosen)


def float64_peft(base: Path, adapter: Path, attention: str = "eager") -> Any:
    """PEFT's model of a folder with the adapter of another, trainable, to be run in `float64_everywhere`."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from llorch.engines.transformers_capture import float64_everywhere

    loader = AutoModelForImageTextToText if has_multimodal_names(adapter) else AutoModelForCausalLM
    with float64_everywhere(refuse=False):  # what rotations are made of is computed here
        model = loader.from_pretrained(base, dtype=torch.float64, attn_implementation=attention)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    settings = model.config.get_text_config().to_dict()
    if settings.get("num_experts") or settings.get("num_local_experts"):
        model.get_base_model().set_experts_implementation("eager")  # pyright: ignore
    return model


def gradients_of(model: Any, adapter: Adapter) -> dict[str, np.ndarray]:
    """Gradients of a PEFT model after its backward pass, by llorch's names, which all trained parameters have."""
    from llorch.lora.peft_format import _stored_names

    found = {name.replace(".default", ""): p.grad.numpy() for name, p in model.named_parameters() if p.requires_grad}
    names = _stored_names(adapter.config, adapter.targets)
    assert found.keys() == set(names.values())
    return {ours: found[theirs] for ours, theirs in names.items()}
