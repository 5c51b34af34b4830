"""Weights of a file or folder put into the torch model, one tensor at a time."""

import torch
from torch import nn

from llorch.torch_model import CausalLM
from llorch.weights import Weights
from llorch.weights.names import inventory


def load_dense(weights: Weights, *, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Build the model with every weight decoded to one dtype.

    Args:
        weights: The model; each weight is read once.
        dtype: Of all weights, and so of the run.
        device: Where they go.

    Returns:
        The model in evaluation mode, its weights frozen.

    Raises:
        FormatError: A weight holds NaN or infinity.
    """
    with torch.device("meta"):
        model = CausalLM(weights.config)
    for row in inventory(weights.config).values():
        tensor = torch.from_numpy(weights.read(row.name).copy()).to(device, dtype)
        put(model, row.huggingface, tensor)
    if weights.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval()


def put(model: nn.Module, path: str, tensor: torch.Tensor) -> None:
    """Set a frozen parameter by its attribute path."""
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, nn.Parameter(tensor, requires_grad=False))
