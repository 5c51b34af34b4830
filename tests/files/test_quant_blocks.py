"""Block decoding where it could go wrong: at the ends of every field, and in pieces, threads and borrowed memory."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from helpers.ggml_library import load_ggml
from helpers.refusals import refuses

from llorch.files import quant
from llorch.files.blocks import DECODERS
from llorch.files.quant import BLOCK_SIZES, GGMLType, decode, decode_into
from tests.files.test_quant import DECODED_BY_GGML, assert_same_bits, random_blocks, traits_of

FILLS = (0x00, 0xFF, 0x0F, 0xF0, 0x77, 0x88, 0x55, 0xAA)  # all codes smallest, largest, and odd places only
# 0, -0, the smallest and largest subnormal, the smallest normal, 1, -1.5, the largest, inf, -inf, quiet and other NaN
FLOAT16_EDGES = (0, 0x8000, 1, 0x83FF, 0x0400, 0x3C00, 0xBE00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFD55)
FLOAT16_FIELDS = {
    **{name: (0,) for name in ("Q1_0", "Q2_0", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS")},
    **{name: (0,) for name in ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")},
    **{name: (0, 2) for name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")},
    "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
BYTE_SCALES = {"MXFP4": (0,), "NVFP4": (0, 1, 2, 3)}
IN_GGUF = [kind for kind in DECODED_BY_GGML if BLOCK_SIZES[kind][0] > 1 and kind.name not in ("Q1_0", "Q2_0")]


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    return load_ggml()


def edge_blocks(kind: GGMLType) -> np.ndarray:
    """Every fill and some random blocks, with every edge in every scale while the other scale is ordinary."""
    block_bytes = BLOCK_SIZES[kind][1]
    plain = np.concatenate([np.full((1, block_bytes), fill, np.uint8) for fill in FILLS] + [random_blocks(kind, 8)])
    made = [plain]
    for start in FLOAT16_FIELDS.get(kind.name, ()):
        for edge in FLOAT16_EDGES:
            blocks = plain.copy()
            for other in FLOAT16_FIELDS[kind.name]:
                blocks[:, other : other + 2] = np.array([edge if other == start else 0x3555], "<u2").view(np.uint8)
            made.append(blocks)
    for start in BYTE_SCALES.get(kind.name, ()):
        made.append(np.repeat(plain, 256, axis=0))
        made[-1][:, start] = np.tile(np.arange(256), len(plain))
    if kind is GGMLType.IQ1_M:
        made += [with_scattered_scale(plain, edge) for edge in FLOAT16_EDGES]
    return np.concatenate(made)


def with_scattered_scale(blocks: np.ndarray, scale: int) -> np.ndarray:
    """IQ1_M keeps its float16 in the upper four bits of its last four 16-bit words."""
    blocks = blocks.copy()
    for index in range(4):
        blocks[:, 49 + 2 * index] = blocks[:, 49 + 2 * index] & 0x0F | (scale >> 4 * index & 15) << 4
    return blocks


@pytest.mark.live
@pytest.mark.parametrize("kind", DECODED_BY_GGML, ids=lambda kind: kind.name)
def test_the_ends_of_every_field_decode_to_the_bits_of_ggml(ggml: ctypes.CDLL, kind: GGMLType):
    blocks = edge_blocks(kind)
    expected = np.empty(len(blocks) * BLOCK_SIZES[kind][0], np.float32)
    traits_of(ggml, kind).to_float(blocks.ctypes.data, expected.ctypes.data, expected.size)
    assert_same_bits(decode(blocks.reshape(-1), kind, expected.shape), expected)
    assert BLOCK_SIZES[kind][0] == 1 or len(blocks) > 16 * 12


def test_every_block_type_has_edges_to_test():
    named = {*FLOAT16_FIELDS, *BYTE_SCALES, "IQ1_M"}
    assert named == {kind.name for kind in DECODED_BY_GGML if BLOCK_SIZES[kind][0] > 1}


@pytest.mark.live
@pytest.mark.parametrize("kind", [GGMLType.F16, GGMLType.BF16], ids=lambda kind: kind.name)
def test_every_16_bit_float_decodes_to_the_bits_of_ggml(ggml: ctypes.CDLL, kind: GGMLType):
    numbers = np.arange(65536, dtype=np.uint16)
    expected = np.empty(65536, np.float32)
    traits_of(ggml, kind).to_float(numbers.ctypes.data, expected.ctypes.data, expected.size)
    assert_same_bits(decode(numbers.view(np.uint8), kind, expected.shape), expected)


def test_every_finite_float16_decodes_without_the_cast_of_numpy():
    numbers = np.arange(65536, dtype=np.uint16).view(np.float16)
    numbers = numbers[np.isfinite(numbers)]  # infinities take another path
    assert_same_bits(decode(numbers.view(np.uint8), GGMLType.F16, numbers.shape), numbers.astype(np.float32))


@pytest.mark.parametrize("kind", IN_GGUF, ids=lambda kind: kind.name)
def test_random_blocks_decode_as_the_gguf_package_does_it(kind: GGMLType):
    blocks = random_blocks(kind, 300)
    with np.errstate(all="ignore"):
        expected = dequantize(blocks, GGMLQuantizationType(kind))
    actual = decode(blocks.reshape(-1), kind, expected.shape)
    numbers = np.isfinite(expected).all(axis=1)
    np.testing.assert_array_equal(actual[numbers], expected[numbers])
    assert numbers.mean() > 0.5


@pytest.mark.parametrize("kind", [GGMLType[name] for name in DECODERS], ids=lambda kind: kind.name)
def test_pieces_of_any_size_decode_to_the_same_bits(kind: GGMLType, monkeypatch: pytest.MonkeyPatch):
    blocks = random_blocks(kind, 37)
    whole = decode(blocks.reshape(-1), kind, (37, BLOCK_SIZES[kind][0]))
    for elements in (1, 8 * BLOCK_SIZES[kind][0]):
        monkeypatch.setattr(quant, "_ELEMENTS_AT_ONCE", elements)
        assert_same_bits(decode(blocks.reshape(-1), kind, whole.shape), whole)


def test_decoding_into_an_array_writes_there_and_nowhere_else():
    blocks = random_blocks(GGMLType.Q6_K, 6)
    space = np.full((8, 256), 7, np.float32)
    decode_into(blocks, GGMLType.Q6_K, space[1:7])
    assert_same_bits(space[1:7], decode(blocks, GGMLType.Q6_K, (6, 256)))
    assert (space[[0, 7]] == 7).all()


@pytest.mark.parametrize(
    ("out", "expected", "actual"),
    [
        (np.zeros((64, 2), np.float32).T, "contiguous float32", ("float32", (4, 8))),
        (np.zeros((2, 64), np.float64), "contiguous float32", "float64"),
        (np.zeros((2, 32), np.float32), 128, 64),
    ],
)
def test_an_array_that_cannot_hold_the_values_is_refused(out: np.ndarray, expected: object, actual: object):
    with refuses(ValueError, expected, where="out", got=actual):
        decode_into(random_blocks(GGMLType.Q8_0, 4), GGMLType.Q8_0, out)


def test_threads_do_not_share_their_memory():
    blocks = [random_blocks(GGMLType.Q4_K, 4096)[start:] for start in range(8)]
    alone = [decode(part, GGMLType.Q4_K, (len(part), 256)) for part in blocks]
    with ThreadPoolExecutor(4) as pool:
        together = pool.map(lambda part: decode(part, GGMLType.Q4_K, (len(part), 256)), blocks)
    for one, other in zip(alone, together, strict=True):
        assert_same_bits(other, one)


def test_read_only_blocks_decode():
    blocks = np.frombuffer(random_blocks(GGMLType.Q5_1, 3).tobytes(), np.uint8)
    assert decode(blocks, GGMLType.Q5_1, (3, 32)).shape == (3, 32)
