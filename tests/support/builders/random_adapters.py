"""Adapters with random numbers in every tensor, on tiny models, and PEFT to ask what they mean."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from builders.tiny_models import random_tensors, write_folder
from llorch.families.config import ModelConfig
from llorch.files import Weights, open_weights
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import Adapter, LoraTensors, assembled, expected_shapes
from llorch.lora.config import LoraConfig
from llorch.model.blocks import forward
from llorch.model.cache import KVCache

IDS = [3, 17, 8, 39, 0, 25]
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def tiny_base(folder: Path, family: str = "llama", *, tied: bool = False) -> Path:
    """A folder of a tiny model, its weights large enough for attention to look somewhere."""
    tensors = {name: array * 2 for name, array in random_tensors(family).items()}
    if tied:
        del tensors["lm_head.weight"]
    return write_folder(folder, tensors, family, tie_word_embeddings=tied)


def random_adapter(model: ModelConfig, *, seed: int = 0, **settings: Any) -> Adapter:
    """An adapter with random A, B (never 0) and magnitudes; settings are those of `LoraConfig`."""
    config = LoraConfig(**{"r": 3, "lora_alpha": 5.0, "target_modules": EVERY} | settings)
    rng = np.random.default_rng(seed)
    arrays = {
        name: np.abs(rng.standard_normal(shape)) if name.endswith("magnitude") else rng.standard_normal(shape) * 0.3
        for name, shape in expected_shapes(config, model).items()
    }
    return assembled(config, arrays, model, where="random")


def fresh(adapter: Adapter) -> Adapter:
    """The same with B of zeros, as training starts."""
    tensors = {n: LoraTensors(t.lora_A, np.zeros_like(t.lora_B)) for n, t in adapter.tensors.items()}
    return Adapter(adapter.config, adapter.targets, tensors)


def same_tensors(first: Adapter, second: Adapter) -> bool:
    """Whether every tensor of two adapters is the same, bit for bit."""
    a, b = first.flat(), second.flat()
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def peft_model(base: Path, adapter: Path | None = None, *, multimodal: bool = False, **config: Any) -> Any:
    """The base in transformers, `whole` with eyes, with an adapter: of a folder, or a fresh one with random numbers."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    loader = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    model = loader.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's advice on tied embeddings, its use of old names
        if adapter is not None:
            return peft.PeftModel.from_pretrained(model, adapter).eval()
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                values = torch.randn(parameter.shape)
                parameter.copy_(values.abs() if "magnitude" in name else values * 0.3)
    return model


def save_quietly(model: Any, folder: Path) -> Path:
    """Save as PEFT does, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return folder


def torch_logits(model: Any, ids: Sequence[int] = IDS) -> np.ndarray:
    """Logits of every token."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([list(ids)])).logits[0].float().numpy()


def adapted_logits(base: Path, adapter: Adapter, ids: Sequence[int] = IDS) -> np.ndarray:
    """Logits of every token from our NumPy page with the adapter beside the weights."""
    return logits_of(AdaptedWeights(open_weights(base), adapter), ids)


def plain_logits(path: Path, ids: Sequence[int] = IDS) -> np.ndarray:
    """Logits of every token from our NumPy page, of a folder or file without an adapter."""
    return logits_of(open_weights(path), ids)


def logits_of(weights: Weights, ids: Sequence[int] = IDS) -> np.ndarray:
    """Logits of every token from our NumPy page."""
    return forward(np.array(ids), weights, KVCache(weights.config, weights.dtype))
