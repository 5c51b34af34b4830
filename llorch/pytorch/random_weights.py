"""Models of a real shape with random weights, made on the device: a device can be measured without a download."""

import math

import torch

from llorch.config import ModelConfig
from llorch.files.names import Weight, inventory
from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.device import Target
from llorch.pytorch.experts import QuantisedExperts
from llorch.pytorch.families import build
from llorch.pytorch.load import put
from llorch.pytorch.packing import Fields, pack, width
from llorch.pytorch.paths import path_of
from llorch.pytorch.quantised_linear import QuantisedEmbedding, QuantisedLinear

SIZE = 0.02  # of weights and of scales; small enough that no activation overflows in float16


@torch.no_grad()
def random_model(config: ModelConfig, target: Target, packed: GGMLType | None = None) -> CausalLM:
    """Build a model, its matrices dense or in blocks of a type, whose size its rows must be a multiple of."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = build(config)
    for row in inventory(config).values():
        if packed is not None and row.is_matrix:
            _put_blocks(model, row, target, packed)
        else:
            _put_dense(model, row, target)
    if config.tie_word_embeddings:
        embedding = model.model.embed_tokens
        if packed is None:
            model.lm_head.weight = embedding.weight
        else:
            model.lm_head = QuantisedLinear(embedding.fields, packed)
    return model.eval()


def _put_dense(model: CausalLM, row: Weight, target: Target) -> None:
    tensor = torch.randn(row.shape, dtype=target.dtype, device=target.device).mul_(SIZE)
    if row.name.endswith("decay"):
        tensor = -1 - tensor.abs()
    put(model, path_of(row.name), tensor + 1 if row.name.endswith("norm") else tensor)


def _put_blocks(model: CausalLM, row: Weight, target: Target, packed: GGMLType) -> None:
    fields = random_fields((math.prod(row.shape[:-1]), row.shape[-1]), packed, target.device)
    if row.name == "embed_tokens":
        leaf = QuantisedEmbedding(fields, packed, target.dtype)
    else:
        leaf = (
            QuantisedLinear(fields, packed) if len(row.shape) == 2 else QuantisedExperts(fields, packed, row.shape[0])
        )
    owner, _, name = path_of(row.name).removesuffix(".weight").rpartition(".")
    setattr(model.get_submodule(owner), name, leaf)


def random_fields(shape: tuple[int, ...], packed: GGMLType, device: torch.device) -> Fields:
    """Random codes, with scales that give numbers of about the size of real weights."""
    elements, n_bytes = BLOCK_SIZES[packed]
    if shape[1] % elements:
        raise ValueError(f"weights {packed.name}: expected a row length divisible by {elements}, got {shape[1]}")
    raw = torch.randint(0, 256, (shape[0], shape[1] // elements * n_bytes), dtype=torch.uint8, device=device)
    fields = pack(raw, packed)
    largest = {GGMLType.Q8_0: 128, GGMLType.Q4_0: 8, GGMLType.Q4_K: 63 * 15, GGMLType.Q6_K: 128 * 32}[packed]
    for field in fields.values():
        if field.is_floating_point():
            field.fill_(2 * SIZE / largest)
    assert width(fields, packed) == shape[1]
    return fields


def random_bytes(config: ModelConfig, target: Target, packed: GGMLType | None = None) -> int:
    """Bytes that `random_model` takes: all weights, and what the largest needs while it is made."""
    shapes = [row.shape for row in inventory(config).values()]
    elements, n_bytes = (1, target.dtype.itemsize) if packed is None else BLOCK_SIZES[packed]
    return sum(map(math.prod, shapes)) * n_bytes // elements + 4 * max(map(math.prod, shapes))


def weight_bytes(model: CausalLM) -> int:
    """Bytes of weights that a decode step of one token reads, each tensor once: of experts those that are chosen.

    An embedding that is no output matrix is not counted.
    """
    experts, sizes = model.config.experts, {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        size = math.prod(tensor.shape) * tensor.element_size()
        if experts is not None and ".mlp.experts." in name:
            size = size * experts.n_experts_per_token // experts.n_experts
        if model.config.tie_word_embeddings or not name.startswith("model.embed_tokens."):
            sizes[tensor.data_ptr()] = size
    return sum(sizes.values())
