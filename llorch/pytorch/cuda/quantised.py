"""Products with packed matrices on CUDA: which kernel makes them, by the number of rows.

    rows      way                                          what bounds it
    1, 2      straight from the blocks, no tensor cores    packed bytes
    3 .. 256  tiles decoded where tensor cores read them   decoding
    more      decoded once into scratch, then the library  the matrix product

Float32, which tensor cores do not take, goes to the library from 33 rows on, where tiles would be decoded twice.
Float64 has the plain way.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from llorch.files.quant import GGMLType
from llorch.pytorch.cuda.quantised_matvec import multiply_few_rows
from llorch.pytorch.cuda.quantised_tiles import decode_to, multiply_by_decoded_tiles
from llorch.pytorch.packing import Fields
from llorch.pytorch.quantised_linear import QuantisedLinear, multiply_by_tiles

FEW = 2
SOME = {torch.float32: 32, torch.bfloat16: 256, torch.float16: 256}
SCRATCH = 1 << 26  # elements: 128 MiB in half precision, more than a matrix inside a layer of an 8B model


def put_kernels(model: nn.Module) -> None:
    """Let every packed layer of a model on a CUDA device multiply by kernels."""
    for module in model.modules():
        if isinstance(module, QuantisedLinear):
            module.multiply = multiply


def multiply(
    x: Float[Tensor, "rows in"], fields: Fields, ggml_type: GGMLType, bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "rows out"]:
    """Compute x @ decode(fields).T + bias, in the dtype of `x`."""
    if x.dtype is torch.float64:
        return multiply_by_tiles(x, fields, ggml_type, bias)
    if len(x) <= FEW:
        return multiply_few_rows(x.contiguous(), fields, ggml_type, bias)
    if len(x) <= SOME[x.dtype]:
        return multiply_by_decoded_tiles(x.contiguous(), fields, ggml_type, bias)
    return _multiply_decoded(x, fields, ggml_type, bias)


def _multiply_decoded(
    x: Float[Tensor, "rows in"], fields: Fields, ggml_type: GGMLType, bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "rows out"]:
    n_out = len(fields["codes"])
    step = max(1, SCRATCH // x.shape[1])
    if n_out <= step:
        return linear(x, decode_to(fields, ggml_type, x.dtype), bias)
    y = x.new_empty(len(x), n_out)
    for start in range(0, n_out, step):
        part = slice(start, start + step)
        tile = decode_to({name: field[part] for name, field in fields.items()}, ggml_type, x.dtype)
        y[:, part] = linear(x, tile, None if bias is None else bias[part])
    return y
