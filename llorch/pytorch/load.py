"""Weights of a file or folder put into the torch model, one tensor at a time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from llorch.config import ModelConfig
from llorch.files import Weights
from llorch.files.names import Weight, inventory, undo_interleave
from llorch.files.packed import Packed
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.packing import PACKERS, Fields, pack
from llorch.pytorch.quantised_linear import QuantisedEmbedding, QuantisedLinear


def load_dense(weights: Weights, *, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Build the model with every weight decoded to one dtype and frozen; NaN and infinity are refused."""
    model = _empty(weights.config)
    for row in inventory(weights.config).values():
        _put_dense(model, weights, row, dtype, device)
    if weights.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval()


def load_packed(weights: Weights, *, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """As `load_dense`, but every matrix of a type in `PACKERS` stays packed."""
    model = _empty(weights.config)
    for row in inventory(weights.config).values():
        if weights.stored_type(row.name) in PACKERS:
            _put_packed(model, weights, row, dtype, device)
        else:
            _put_dense(model, weights, row, dtype, device)
    if weights.config.tie_word_embeddings:
        embedding = model.model.embed_tokens
        if isinstance(embedding, QuantisedEmbedding):
            model.lm_head = QuantisedLinear(embedding.fields, embedding.ggml_type)
        else:
            model.lm_head.weight = embedding.weight
    return model.eval()


def put(model: nn.Module, path: str, tensor: torch.Tensor) -> None:
    """Set a frozen parameter by its attribute path."""
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, nn.Parameter(tensor, requires_grad=False))


class _NoInitialValues(TorchFunctionMode):
    """Parameters stay as they are made; for those without memory, torch would import its compiler to draw numbers."""

    def __torch_function__(
        self, func: Callable, types: Sequence, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def _empty(config: ModelConfig) -> CausalLM:
    """The modules, with parameters that take no memory."""
    with torch.device("meta"), _NoInitialValues():
        return CausalLM(config)


def _put_dense(model: nn.Module, weights: Weights, row: Weight, dtype: torch.dtype, device: torch.device) -> None:
    put(model, row.huggingface, torch.from_numpy(weights.read(row.name).copy()).to(device, dtype))


def _put_packed(model: nn.Module, weights: Weights, row: Weight, dtype: torch.dtype, device: torch.device) -> None:
    """Replace the module that a matrix belongs to by one that keeps it packed."""
    stored = weights.source.packed(row.gguf)  # only GGUF files have these types
    by_row = undo_interleave(stored.by_row, row.interleaved_heads) if row.interleaved_heads else stored.by_row.copy()
    fields = pack(torch.from_numpy(by_row).to(device), stored.ggml_type)
    _require_finite(fields, stored)
    owner, _, name = row.huggingface.removesuffix(".weight").rpartition(".")
    if row.name == "embed_tokens":
        leaf = QuantisedEmbedding(fields, stored.ggml_type, dtype)
    else:
        leaf = QuantisedLinear(fields, stored.ggml_type)
    setattr(model.get_submodule(owner), name, leaf)


def _require_finite(fields: Fields, stored: Packed) -> None:
    """Refuse what decodes to NaN or infinity: that is so exactly when a float of a block is not finite."""
    stored.require_scales()
    if not all(field.isfinite().all() for field in fields.values() if field.is_floating_point()):
        for start, tile in stored.tiles():  # decoded once more to say where
            stored.require_finite(start, tile)
