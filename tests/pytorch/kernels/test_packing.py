import numpy as np
import pytest
import torch
from builders.packed_matrices import packed_matrix, raw_matrix

from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.files.quant import decode as decode_with_numpy
from llorch.pytorch.kernels import packing
from llorch.pytorch.kernels.packing import PACKERS, decode, four_bits, pack, six_bits, two_bits, width

EVERY_TYPE = pytest.mark.parametrize("ggml_type", PACKERS, ids=lambda kind: kind.name)
FLOATS = {GGMLType.Q8_0: (0,), GGMLType.Q4_0: (0,), GGMLType.Q4_K: (0, 2), GGMLType.Q6_K: (208,)}  # offsets in a block
EXTREMES = np.array([0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504.0, -65504.0, np.inf, -np.inf, np.nan], "<f2")


def assert_same_bits(raw: np.ndarray, ggml_type: GGMLType) -> None:
    """Only the payload of a NaN is free."""
    shape = (len(raw), raw.shape[1] // BLOCK_SIZES[ggml_type][1] * BLOCK_SIZES[ggml_type][0])
    expected = decode_with_numpy(raw, ggml_type, shape)
    actual = decode(pack(torch.from_numpy(raw), ggml_type), ggml_type).numpy()
    assert actual.shape == expected.shape
    assert ((actual.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(actual) & np.isnan(expected))).all()


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (16, 8)], ids=str)
@EVERY_TYPE
def test_any_bytes_decode_to_the_bits_of_numpy(ggml_type, shape, rng):
    rows, blocks = shape
    assert_same_bits(rng.integers(0, 256, (rows, blocks * BLOCK_SIZES[ggml_type][1]), dtype=np.uint8), ggml_type)


@EVERY_TYPE
def test_extreme_scales_decode_to_the_bits_of_numpy(ggml_type, rng):
    raw = rng.integers(0, 256, (len(EXTREMES), len(EXTREMES), BLOCK_SIZES[ggml_type][1]), dtype=np.uint8)
    first, *rest = FLOATS[ggml_type]
    raw[:, :, first : first + 2] = EXTREMES.view(np.uint8).reshape(-1, 1, 2)
    for offset in rest:
        raw[:, :, offset : offset + 2] = EXTREMES.view(np.uint8).reshape(1, -1, 2)
    assert_same_bits(raw.reshape(len(EXTREMES), -1), ggml_type)


@EVERY_TYPE
def test_fields_take_the_bytes_of_the_file_and_no_more(ggml_type):
    raw, fields = raw_matrix(ggml_type, 5, 512), packed_matrix(ggml_type, 5, 512)
    assert sum(field.numel() * field.element_size() for field in fields.values()) == raw.size
    assert all(field.is_contiguous() and len(field) == 5 for field in fields.values())
    assert width(fields, ggml_type) == 512


@EVERY_TYPE
def test_some_rows_of_the_fields_decode_by_themselves_whatever_their_shape(ggml_type):
    fields, ids = packed_matrix(ggml_type, 9, 512), torch.tensor([[8, 0, 3], [3, 7, 1]])
    actual = decode({name: field[ids] for name, field in fields.items()}, ggml_type)
    assert torch.equal(actual, decode(fields, ggml_type)[ids])


def test_element_4j_plus_i_is_part_j_of_word_i():
    for element in range(32):
        part, word = divmod(element, 4)
        words = np.zeros(4, "<u4")
        words[word] = 9 << 4 * part
        codes = four_bits(torch.from_numpy(words.view(np.uint8))[None])[0]
        assert (codes.nonzero().flatten().tolist(), int(codes[element])) == ([element], 9)
        halves = np.zeros(4, "<u2")
        halves[word] = 2 << 2 * part
        uppers = two_bits(torch.from_numpy(halves.view(np.uint8))[None])[0]
        assert (uppers.nonzero().flatten().tolist(), int(uppers[element])) == ([element], 2)


def test_scales_of_q4_k_are_a_stream_of_twelve_bits(rng):
    scale, minimum = rng.integers(0, 64, (2, 8))
    stream = sum(int(s | m << 6) << 12 * run for run, (s, m) in enumerate(zip(scale, minimum, strict=True)))
    actual = six_bits(torch.from_numpy(np.frombuffer(stream.to_bytes(12, "little"), np.uint8).copy())[None])
    assert (actual[0][0].tolist(), actual[1][0].tolist()) == (scale.tolist(), minimum.tolist())


@pytest.mark.parametrize(
    ("broken", "ggml_type"), [("four_bits", GGMLType.Q4_K), ("two_bits", GGMLType.Q6_K), ("six_bits", GGMLType.Q4_K)]
)
def test_bits_in_another_order_are_seen(broken, ggml_type, monkeypatch, rng):
    right = getattr(packing, broken)
    monkeypatch.setattr(packing, broken, lambda bits: right(bits.flip(-1)))
    raw = rng.integers(0, 256, (2, BLOCK_SIZES[ggml_type][1]), dtype=np.uint8)
    with pytest.raises(AssertionError):
        assert_same_bits(raw, ggml_type)
