"""Quantised matrices as torch tensors, and their decoding to float32: the reference of every kernel.

On the CPU, a matrix of a GGUF file has one field, `blocks`: its rows as in the file (uint8), in the model's order. On
CUDA it has fields of codes, scales and minima. A file interleaves them, which prevents wide loads; here each is a
separate matrix with as many rows as the weight. Bits are moved and none is added.

    type   field   dtype    columns      meaning
    Q8_0   codes   int8     in           in the order of the elements
           d       float16  in / 32      x = d * code
    Q4_0   codes   uint8    in / 2       four bits, see below
           d       float16  in / 32      x = d * (code - 8)
    Q4_K   codes   uint8    in / 2       four bits, see below
           scales  uint8    in / 64 * 3  twelve bits for 32 elements: scale in the lower six, min in the upper six
           d       float16  in / 256     x = d * scale * code - dmin * min
           dmin    float16  in / 256
    Q6_K   codes   uint8    in / 2       the lower four bits, see below
           upper   uint8    in / 4       the upper two bits, see below
           scales  int8     in / 16      x = d * scale * (code - 32)
           d       float16  in / 256
    BF16   codes   bfloat16 in           the numbers, which the float32 CPU kernels convert
    F16    codes   float16  in           the same
    Table          matrix of a quantised Hugging Face folder, see `llorch.files.quantised.fields`
           d, zero, minimum on CUDA: bfloat16 or float16, if that dtype holds each number exactly

Codes of less than a byte: 32 elements are four little-endian words, and element 4 * j + i is part j of word i. So a
thread that loads 16 bytes has all codes that share a scale, and the inputs of part j of its words are adjacent.

    codes   part j is bits 4 * j to 4 * j + 3 of a 32-bit word
    upper   part j is bits 2 * j and 2 * j + 1 of a 16-bit word
    scales  (Q4_K) a little-endian stream of 12-bit numbers: even numbers start at a byte, odd ones in its middle

Source: ggml src/ggml-common.h (layouts in a file), see `llorch.files.blocks`; the order here is llorch's.
"""

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from llorch.files.quant import BLOCK_SIZES, GGMLType, decode_by_reference
from llorch.files.quantised.fields import TABLES, Table
from llorch.ops.compiled.products import KINDS

Fields = Mapping[str, Tensor]


Kind = GGMLType | Table  # kind of a packed matrix
HALF_TYPES = MappingProxyType({GGMLType.BF16: torch.bfloat16, GGMLType.F16: torch.float16})  # numbers of 2 bytes


def pack(raw: UInt8[Tensor, "out row_bytes"], ggml_type: GGMLType) -> dict[str, Tensor]:
    """Split the blocks of a matrix, as in its file, into fields; rows must have the model's order."""
    if ggml_type in HALF_TYPES:
        return {"codes": raw.contiguous().view(HALF_TYPES[ggml_type])}
    blocks = raw.unflatten(1, (-1, BLOCK_SIZES[ggml_type][1]))  # (out, blocks, block_bytes)
    return {name: field.contiguous() for name, field in PACKERS[ggml_type](blocks).items()}


def file_fields(raw: UInt8[Tensor, "out row_bytes"], ggml_type: GGMLType) -> dict[str, Tensor]:
    """Return the fields of a matrix for its device, from rows of blocks in the model's order."""
    if ggml_type in HALF_TYPES or raw.device.type == "cuda":
        return pack(raw, ggml_type)
    return {"blocks": raw}


def decode(fields: Fields, ggml_type: Kind) -> Float32[Tensor, "*rows in"]:
    """Decode whole rows to the same bits as `llorch.files`; a scale that is not finite gives inf or NaN."""
    if "blocks" in fields:
        assert not isinstance(ggml_type, Table)
        return _decode_blocks(fields["blocks"], ggml_type)
    return _decode_table(fields, ggml_type) if isinstance(ggml_type, Table) else DECODERS[ggml_type](fields)


def width(fields: Fields, ggml_type: Kind) -> int:
    """Return the number of elements of one row; a byte of codes has two elements if they have four bits."""
    if "blocks" in fields:
        size, n_bytes = BLOCK_SIZES[GGMLType[ggml_type.name]]
        return fields["blocks"].shape[-1] // n_bytes * size
    return fields["codes"].shape[-1] * (2 if ggml_type.name in ("Q4_0", "Q4_K", "Q6_K", "TABLE_4") else 1)


def arrays_of(fields: Fields) -> dict[str, np.ndarray]:
    """View fields on the CPU as NumPy arrays."""
    return {name: field.numpy() for name, field in fields.items()}


@cache
def values_of(table: Table, device: torch.device) -> Float32[Tensor, " codes"]:
    """Copy the numbers of a table to a device."""
    return torch.frombuffer(bytearray(table.values), dtype=torch.float32).to(device)


def four_bits(codes: UInt8[Tensor, "*rows bytes"]) -> UInt8[Tensor, "*rows in"]:
    """Unpack codes of four bits in the order of the elements."""
    words = codes.unflatten(-1, (-1, 4, 4))  # (..., runs, word, byte)
    parts = torch.stack((words & 15, words >> 4), dim=-1)  # (..., runs, word, byte, half)
    return parts.flatten(-2).mT.flatten(-3)


def two_bits(upper: UInt8[Tensor, "*rows bytes"]) -> UInt8[Tensor, "*rows in"]:
    """Unpack the upper two bits of codes in the order of the elements."""
    words = upper.unflatten(-1, (-1, 4, 2))  # (..., runs, word, byte)
    parts = torch.stack([words >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)  # (..., runs, word, byte, quarter)
    return parts.flatten(-2).mT.flatten(-3)


def six_bits(scales: UInt8[Tensor, "*rows bytes"]) -> tuple[UInt8[Tensor, "*rows runs"], UInt8[Tensor, "*rows runs"]]:
    """Unpack scales and minima of Q4_K, six bits each, one of each per 32 elements."""
    first, middle, last = scales.unflatten(-1, (-1, 3)).unbind(-1)  # three bytes have 12 bits for each of two runs
    scale = torch.stack((first & 63, middle >> 4 | (last & 3) << 4), dim=-1)
    minimum = torch.stack((first >> 6 | (middle & 15) << 2, last >> 2), dim=-1)
    return scale.flatten(-2), minimum.flatten(-2)


def shorten(fields: Fields) -> Fields:
    """Store scales, zero points and minima in 16 bits if no number changes, for kernels that convert them back."""
    return {name: _in_16_bits(field) if field.dtype is torch.float32 else field for name, field in fields.items()}


def _in_16_bits(field: Float32[Tensor, "rows groups"]) -> Tensor:
    candidates = (field.to(dtype) for dtype in HALF_TYPES.values())
    return next((candidate for candidate in candidates if torch.equal(candidate.float(), field)), field)


def _pack_q8_0(blocks: Tensor) -> dict[str, Tensor]:
    return {"codes": blocks[..., 2:].flatten(1).view(torch.int8), "d": _as_float16(blocks[..., :2])}


def _pack_q4_0(blocks: Tensor) -> dict[str, Tensor]:
    codes = torch.cat((blocks[..., 2:] & 15, blocks[..., 2:] >> 4), dim=-1)  # (out, blocks, 32)
    return {"codes": join_four_bits(codes.flatten(1)), "d": _as_float16(blocks[..., :2])}


def _pack_q4_k(blocks: Tensor) -> dict[str, Tensor]:
    quarters = blocks[..., 16:].unflatten(-1, (4, 1, 32))  # 64 elements each
    codes = torch.cat((quarters & 15, quarters >> 4), dim=-2)  # (out, blocks, 4, 2, 32)
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scale = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)  # (out, blocks, 8)
    minimum = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    return {
        "codes": join_four_bits(codes.flatten(1)),
        "scales": _join_six_bits(scale.flatten(1), minimum.flatten(1)),
        "d": _as_float16(blocks[..., :2]),
        "dmin": _as_float16(blocks[..., 2:4]),
    }


def _pack_q6_k(blocks: Tensor) -> dict[str, Tensor]:
    lower = blocks[..., :128].unflatten(-1, (2, 1, 64))
    lower = torch.cat((lower & 15, lower >> 4), dim=-2)  # (out, blocks, 2, 2, 64)
    upper = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    upper = torch.cat([upper >> shift & 3 for shift in (0, 2, 4, 6)], dim=-2)  # (out, blocks, 2, 4, 32)
    return {
        "codes": join_four_bits(lower.flatten(1)),
        "upper": _join_two_bits(upper.flatten(1)),
        "scales": blocks[..., 192:208].flatten(1).view(torch.int8),
        "d": _as_float16(blocks[..., 208:]),
    }


def _decode_blocks(blocks: UInt8[Tensor, "*rows row_bytes"], ggml_type: GGMLType) -> Tensor:
    """Decode rows of blocks on the CPU, by the decoder of files."""
    decoded = torch.empty(*blocks.shape[:-1], width({"blocks": blocks}, ggml_type))
    if decoded.numel():
        decode_by_reference(blocks.contiguous().numpy(), ggml_type, decoded.numpy())
    return decoded


def _decode_q8_0(fields: Fields) -> Tensor:
    return _scaled(fields["codes"], fields["d"].float())


def _decode_q4_0(fields: Fields) -> Tensor:
    return _scaled(four_bits(fields["codes"]).view(torch.int8) - 8, fields["d"].float())


def _decode_q4_k(fields: Fields) -> Tensor:
    scale, minimum = six_bits(fields["scales"])
    scaled = _scaled(four_bits(fields["codes"]), _scaled(scale, fields["d"].float()))
    minima = _scaled(minimum, fields["dmin"].float())
    return (scaled.unflatten(-1, (minima.shape[-1], -1)) - minima[..., None]).flatten(-2)


def _decode_q6_k(fields: Fields) -> Tensor:
    codes = four_bits(fields["codes"]) | two_bits(fields["upper"]) << 4
    return _scaled(codes.view(torch.int8) - 32, _scaled(fields["scales"], fields["d"].float()))


def _decode_half(fields: Fields) -> Tensor:
    return fields["codes"].float()


def _decode_table(fields: Fields, table: Table) -> Tensor:
    codes = four_bits(fields["codes"]) if table.name == "TABLE_4" else fields["codes"]
    numbers = values_of(table, codes.device)[codes.int()].unflatten(-1, (fields["d"].shape[-1], -1))
    if "zero" in fields:
        numbers = numbers - fields["zero"].float()[..., None]
    numbers = numbers * fields["d"].float()[..., None]
    if "minimum" in fields:
        numbers = numbers + fields["minimum"].float()[..., None]
    numbers = numbers.flatten(-2)
    if table.factor is not None:
        numbers = numbers * table.factor
    if table.divisor is None:
        return numbers
    return numbers / torch.full((), table.divisor, device=numbers.device)  # CUDA multiplies by 1 / a Python number


def _scaled(numbers: Tensor, scales: Tensor) -> Tensor:
    """Multiply integers by the scale of their run, rounded to float32."""
    runs = numbers.unflatten(-1, (scales.shape[-1], -1))
    return (runs.float() * scales[..., None]).flatten(-2)


def _as_float16(columns: Tensor) -> Tensor:
    """Read two bytes of every block as a float16 number."""
    return columns.flatten(1).contiguous().view(torch.float16)


def join_four_bits(codes: UInt8[Tensor, "out in"]) -> UInt8[Tensor, "out bytes"]:
    """Pack codes of four bits; inverse of `four_bits`."""
    low, high = codes.unflatten(1, (-1, 4, 2, 4)).unbind(3)  # (out, runs, byte, word)
    return (low | high << 4).mT.flatten(1)


def _join_two_bits(codes: UInt8[Tensor, "out in"]) -> UInt8[Tensor, "out bytes"]:
    """Pack codes of two bits; inverse of `two_bits`."""
    parts = codes.unflatten(1, (-1, 8, 4)).mT  # (out, runs, word, part)
    return (parts[..., ::4] | parts[..., 1::4] << 2 | parts[..., 2::4] << 4 | parts[..., 3::4] << 6).flatten(1)


def _join_six_bits(scale: UInt8[Tensor, "out runs"], minimum: UInt8[Tensor, "out runs"]) -> UInt8[Tensor, "out bytes"]:
    """Pack scales and minima of six bits; inverse of `six_bits`."""
    low, high = scale.unflatten(1, (-1, 2)).unbind(-1)
    low_min, high_min = minimum.unflatten(1, (-1, 2)).unbind(-1)
    parts = (low | low_min << 6, low_min >> 2 | high << 4, high >> 4 | high_min << 2)
    return torch.stack(parts, dim=-1).flatten(1)


PACKERS: Mapping[GGMLType, Callable[[Tensor], dict[str, Tensor]]] = MappingProxyType(
    {GGMLType.Q8_0: _pack_q8_0, GGMLType.Q4_0: _pack_q4_0, GGMLType.Q4_K: _pack_q4_k, GGMLType.Q6_K: _pack_q6_k}
)
DECODERS: Mapping[GGMLType, Callable[[Fields], Tensor]] = MappingProxyType({
    GGMLType.Q8_0: _decode_q8_0, GGMLType.Q4_0: _decode_q4_0, GGMLType.Q4_K: _decode_q4_k, GGMLType.Q6_K: _decode_q6_k,
    GGMLType.BF16: _decode_half, GGMLType.F16: _decode_half,
})  # fmt: skip

KIND_NAMES = (*(kind.name for kind in PACKERS), *TABLES)  # kinds with kernels on CUDA
CPU_BLOCK_TYPES = tuple(GGMLType[name] for name in KINDS if name not in ("F32", *TABLES) and "F16" not in name)
CPU_KIND_NAMES = (*(kind.name for kind in CPU_BLOCK_TYPES), *TABLES, *(kind.name for kind in HALF_TYPES))
