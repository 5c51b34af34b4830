"""Random models of families whose layers treat positions otherwise: transformers' own, and ours of their weights."""

from typing import Any

import numpy as np
import torch

from llorch.engines.transformers_capture import float64_everywhere
from llorch.families.config import ModelConfig, YarnScaling
from llorch.families.layers import Layer, Temperature
from llorch.files import Weights
from llorch.files.tensor_names import inventory

COMMON = {"family": "llama", "hidden_size": 48, "intermediate_size": 80, "n_heads": 6, "n_kv_heads": 2, "head_dim": 10,
          "vocab_size": 104, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": None, "qkv_bias": False,
          "max_position_embeddings": 512, "o_bias": False, "qk_norm": False, "tie_word_embeddings": False}  # fmt: skip
THEIRS = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 2,
          "head_dim": 10, "vocab_size": 104, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
          "tie_word_embeddings": False, "pad_token_id": None}  # fmt: skip
ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16,
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}  # fmt: skip
YARN = YarnScaling(factor=8.0, original_max_position_embeddings=16, attention_factor=1.0)
FAMILIES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {  # their settings, layers, our settings
    "Mistral": ({"sliding_window": 7}, 2, {"layers": (Layer(window=7),) * 2}),
    "Qwen2": (
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, 3,
        {"layers": (Layer(), *(Layer(window=7),) * 2), "qkv_bias": True},
    ),
    "SmolLM3": ({}, 5, {"layers": tuple(Layer(rope=i != 3) for i in range(5)), "rope_theta": 2e6}),
    "Ministral3": (
        {"rope_parameters": ROPE}, 2,
        {"layers": (Layer(has_attention_temperature=True),) * 2, "rope_scaling": YARN,
         "temperature": Temperature(scale=0.1, floor=16, offset=0)},
    ),
}  # fmt: skip


class FromModule(Weights):
    """Weights of a module of transformers, as a file would give them."""

    cache_dtype = np.float64  # pyright: ignore

    def __init__(self, config, state):
        names = {weight.huggingface: name for name, weight in inventory(config).items()}
        self.config, self._arrays = config, {names[name]: state[name].numpy() for name in names}

    def __getitem__(self, name):
        return self._arrays[name]

    def layer(self, i):  # pyright: ignore
        start = f"layers.{i}."
        return {name.removeprefix(start): a for name, a in self._arrays.items() if name.startswith(start)}


def random_model(family: str) -> tuple[Any, FromModule]:
    """A model of transformers in float64, and its weights and hyperparameters for ours."""
    import transformers

    own, n_layers, ours = FAMILIES[family]
    torch.manual_seed(0)
    with float64_everywhere(refuse=False):
        kind = getattr(transformers, f"{family}Config")
        values = THEIRS | own | {"num_hidden_layers": n_layers, "attn_implementation": "eager"}
        model = getattr(transformers, f"{family}ForCausalLM")(kind(**values)).eval()
        for tensor in model.parameters():
            torch.nn.init.normal_(tensor, 0.5, 0.3) if tensor.ndim == 1 else torch.nn.init.normal_(tensor, 0, 0.2)
    return model, FromModule(ModelConfig(**COMMON | {"n_layers": n_layers} | ours), model.state_dict())  # pyright: ignore


def logits_of(model: Any, ids: np.ndarray, first: int = 0) -> np.ndarray:
    """Of every token of one sequence, in float64."""
    positions = torch.arange(first, first + len(ids))[None]
    with float64_everywhere(), torch.no_grad():
        return model(torch.tensor(ids[None]), position_ids=positions).logits[0].numpy()
