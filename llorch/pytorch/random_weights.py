"""Models of a real shape with random weights, made on the device, to measure a device without a download."""

import math
from collections.abc import Mapping
from statistics import NormalDist
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from llorch.families.config import ModelConfig
from llorch.files.quant import BLOCK_SIZES, SCALE_OFFSETS, GGMLType
from llorch.files.quantised.codes import E4M3, INT8, integers
from llorch.files.quantised.fields import Table
from llorch.files.tensor_names import Weight, inventory
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.device import Target
from llorch.pytorch.kernels.packing import HALF_TYPES, Fields, Kind, file_fields, shorten, values_of
from llorch.pytorch.load import completed, path_of, put, put_fields
from llorch.pytorch.models.families import build
from llorch.runtime.errors import UserError

GROUP = 64  # columns per scale of a table, as in MLX and bitsandbytes
_NF4 = NormalDist()
TABLE_EXAMPLES: Mapping[str, Table] = MappingProxyType(
    {
        "TABLE_4": Table("TABLE_4", integers(4).tobytes()),
        "TABLE_8": Table("TABLE_8", E4M3.tobytes()),
        "NF4": Table("TABLE_4", np.array([_NF4.inv_cdf((i + 0.5) / 16) for i in range(16)], np.float32).tobytes()),
        "INT8": Table("TABLE_8", INT8.tobytes()),
    }
)  # NF4 values resemble those of a file
_LARGEST = {  # magnitude of a number whose block has the scale 1
    GGMLType.Q8_0: 128, GGMLType.Q4_0: 8, GGMLType.Q4_1: 15, GGMLType.Q5_0: 16, GGMLType.Q5_1: 31, GGMLType.IQ4_NL: 127,
    GGMLType.Q2_K: 15 * 3, GGMLType.Q3_K: 32 * 4, GGMLType.Q4_K: 63 * 15, GGMLType.Q5_K: 63 * 31,
    GGMLType.Q6_K: 128 * 32, GGMLType.IQ4_XS: 32 * 127, GGMLType.MXFP4: 12,
}  # fmt: skip
SIZE = 0.02  # standard deviation of weights; no activation overflows in float16


@torch.no_grad()
def random_model(config: ModelConfig, target: Target, packed: Kind | None = None) -> CausalLM:
    """Build a model with dense or packed random matrices; row lengths must be multiples of the block size."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = build(config)
    for weight in inventory(config).values():
        if packed is not None and weight.is_matrix:
            fields = random_fields((math.prod(weight.shape[:-1]), weight.shape[-1]), packed, target.device)
            put_fields(model, weight, fields, packed, target.dtype)
        else:
            _put_dense(model, weight, target)
    return completed(model)


def _put_dense(model: CausalLM, weight: Weight, target: Target) -> None:
    """Draw a weight: norms near 1, decays below -1, others near 0."""
    tensor = torch.randn(weight.shape, dtype=target.dtype, device=target.device).mul_(SIZE)
    if weight.name.endswith("decay"):
        tensor = -1 - tensor.abs()
    put(model, path_of(weight.name), tensor + 1 if weight.name.endswith("norm") else tensor)


def random_fields(shape: tuple[int, ...], packed: Kind, device: torch.device) -> Fields:
    """Draw random codes, with scales that give numbers of the size of real weights."""
    elements, n_bytes = _block_size(packed)
    if shape[1] % elements:
        raise UserError(f"weights {packed.name}: expected a row length divisible by {elements}, got {shape[1]}")
    if not isinstance(packed, Table) and packed in HALF_TYPES:
        return {"codes": (SIZE * torch.randn(shape, device=device)).to(HALF_TYPES[packed])}
    raw = torch.randint(0, 256, (shape[0], shape[1] // elements * n_bytes), dtype=torch.uint8)
    if isinstance(packed, Table):
        return _random_table(raw.to(device), packed, shape[1] // GROUP)
    blocks = raw.view(-1, n_bytes)
    scale = torch.tensor([2 * SIZE / _LARGEST[packed]], dtype=torch.float16).view(torch.uint8)
    for offset in SCALE_OFFSETS[packed]:
        blocks[:, offset : offset + 2] = scale
    if packed is GGMLType.MXFP4:
        blocks[:, 0] = 120  # 2 ** -8, for numbers up to 0.05
    return file_fields(raw.to(device), packed)


def _random_table(codes: Tensor, table: Table, n_groups: int) -> Fields:
    """Add equal scales for groups of `GROUP` columns, and minima if the table has no negative values.

    Scales and minima of integers fit in 16 bits, as in most folders; others are float32, as in NF4 and block-wise FP8.
    """
    numbers = values_of(table, codes.device)
    if not numbers.isfinite().all():  # some codes stand for NaN or infinity
        codes = codes.where(numbers.isfinite()[codes.int()], 0)
    d = torch.full((len(codes), n_groups), 2 * SIZE / float(numbers.nan_to_num(0).abs().max()), device=codes.device)
    if (numbers == numbers.round()).all():
        d = d.bfloat16().float()
    fields = {"codes": codes, "d": d} | (
        {"minimum": -d * round(float(numbers.max()) / 2)} if (numbers >= 0).all() else {}
    )
    return shorten(fields) if codes.device.type == "cuda" else fields


def _block_size(packed: Kind) -> tuple[int, int]:
    """Return elements and bytes of the smallest unit of codes: a block, or a group of a table."""
    if isinstance(packed, Table):
        return GROUP, GROUP // 2 if packed.name == "TABLE_4" else GROUP
    return BLOCK_SIZES[packed]


def kind_named(name: str) -> Kind:
    """Return a kind of packed matrix (GGML type or `Table`) by the name of its kernels or of its table."""
    return TABLE_EXAMPLES[name] if name in TABLE_EXAMPLES else GGMLType[name]


def random_bytes(config: ModelConfig, target: Target, packed: Kind | None = None) -> int:
    """Return the bytes that `random_model` needs: all weights, and the work space of the largest."""
    shapes = [weight.shape for weight in inventory(config).values()]
    elements, n_bytes = (1, target.dtype.itemsize) if packed is None else _block_size(packed)
    scales = 2 * sum(map(math.prod, shapes)) * 4 // GROUP if isinstance(packed, Table) else 0
    return sum(map(math.prod, shapes)) * n_bytes // elements + scales + 4 * max(map(math.prod, shapes))


def weight_bytes(model: CausalLM) -> int:
    """Return the bytes of weights that a decode step of one token reads: each tensor once, selected experts only.

    An embedding that is not tied to the output matrix is not counted.
    """
    experts, sizes = model.config.experts, {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        size = math.prod(tensor.shape) * tensor.element_size()
        if experts is not None and ".mlp.experts." in name:
            size = size * experts.n_experts_per_token // experts.n_experts
        if model.config.tie_word_embeddings or not name.startswith("model.embed_tokens."):
            sizes[tensor.data_ptr()] = size
    return sum(sizes.values())
