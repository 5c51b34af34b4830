import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from helpers.ggml_library import cpu_traits_of, load_ggml
from helpers.refusals import assert_tells, refuses

from llorch.files import quant as encoding
from llorch.files.quant import (
    ACTIVATION_TYPE,
    BLOCK_SIZES,
    LARGEST,
    GGMLType,
    compiled_decoder_is_right,
    decode,
    decode_by_reference,
    decode_minima,
    encode,
    encoded_size,
    has_bad_scale,
)
from llorch.ops.compiled.library import library
from llorch.ops.compiled.products import KINDS, LARGE, CompiledMatrix

COMPILED = [GGMLType[name] for name in KINDS if name != "F32" and not name.startswith("TABLE")]
INTEGERS = {GGMLType.I8, GGMLType.I16, GGMLType.I32, GGMLType.I64}
NO_DECODER_IN_GGML = {GGMLType.F32, GGMLType.F64, GGMLType.Q8_1, GGMLType.Q8_K}
DECODED_BY_GGML = [kind for kind in GGMLType if kind not in INTEGERS | NO_DECODER_IN_GGML]


class Traits(ctypes.Structure):
    """The first fields of `struct ggml_type_traits`."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block_size", ctypes.c_int64),
        ("block_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    return load_ggml()


def traits_of(ggml: ctypes.CDLL, kind: GGMLType) -> Traits:
    ggml.ggml_get_type_traits.restype = ctypes.POINTER(Traits)
    return ggml.ggml_get_type_traits(int(kind)).contents


def random_blocks(kind: GGMLType, count: int) -> np.ndarray:
    return np.random.default_rng(int(kind)).integers(0, 256, (count, BLOCK_SIZES[kind][1]), dtype=np.uint8)


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Bit for bit, -0 from 0 included; only the payload of a NaN is free."""
    both_nan = np.isnan(actual) & np.isnan(expected)
    assert actual.shape == expected.shape
    assert np.all((actual.view(np.uint32) == expected.view(np.uint32)) | both_nan)


@pytest.mark.live
@pytest.mark.parametrize("kind", GGMLType, ids=lambda kind: kind.name)
def test_block_sizes_are_those_of_ggml(ggml: ctypes.CDLL, kind: GGMLType):
    traits = traits_of(ggml, kind)
    assert (traits.block_size, traits.type_size) == BLOCK_SIZES[kind]


@pytest.mark.live
def test_no_type_of_ggml_is_missing(ggml: ctypes.CDLL):
    ggml.ggml_get_type_traits.restype = ctypes.POINTER(Traits)
    assert {number for number in range(43) if ggml.ggml_get_type_traits(number).contents.block_size} == set(GGMLType)


@pytest.mark.live
def test_activations_are_rounded_to_what_ggml_rounds_them_to():
    traits = {kind: cpu_traits_of(kind) for kind in GGMLType}
    rounded = {kind: GGMLType(of_kind.vec_dot_type).name for kind, of_kind in traits.items() if of_kind.vec_dot}
    assert rounded == ACTIVATION_TYPE


def test_minima_of_blocks_are_found_behind_their_scales():
    for kind in (GGMLType.Q4_1, GGMLType.Q5_1):
        raw = np.zeros((4, BLOCK_SIZES[kind][1]), np.uint8)
        raw[:, :4] = np.array([[7, -0.5], [7, 0.25], [7, 2], [7, -3]], "<f2").view(np.uint8)
        minima = decode_minima(raw.reshape(-1), kind, (2, 64))
        assert minima.dtype == np.float32
        assert minima.tolist() == [[-0.5, 0.25], [2, -3]]
        raw[:, :2] = 0  # a scale of 0 leaves the minimum
        assert np.array_equal(decode(raw.reshape(-1), kind, (2, 64))[:, ::32], minima)


@pytest.mark.live
@pytest.mark.parametrize("kind", DECODED_BY_GGML, ids=lambda kind: kind.name)
def test_random_bytes_decode_to_the_bits_of_ggml(ggml: ctypes.CDLL, kind: GGMLType):
    blocks = random_blocks(kind, max(512, 8192 // BLOCK_SIZES[kind][0]))
    expected = np.empty(len(blocks) * BLOCK_SIZES[kind][0], np.float32)
    traits_of(ggml, kind).to_float(blocks.ctypes.data, expected.ctypes.data, expected.size)
    assert_same_bits(decode(blocks.reshape(-1), kind, expected.shape), expected)
    assert np.isfinite(expected).mean() > 0.5  # most of what was compared were numbers


@pytest.mark.live
@pytest.mark.parametrize("kind", DECODED_BY_GGML, ids=lambda kind: kind.name)
def test_blocks_that_ggml_calls_invalid_are_found(ggml: ctypes.CDLL, kind: GGMLType):
    ggml.ggml_validate_row_data.restype = ctypes.c_bool
    ggml.ggml_validate_row_data.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    blocks = random_blocks(kind, 4096 if BLOCK_SIZES[kind][0] > 1 else 65_536)
    values = decode(blocks.reshape(-1), kind, (len(blocks), BLOCK_SIZES[kind][0]))
    for block, row in zip(blocks[:500], values[:500], strict=True):
        valid = ggml.ggml_validate_row_data(int(kind), block.ctypes.data, block.nbytes)  # reports on stderr
        assert valid or not np.isfinite(row).all() or has_bad_scale(block, kind)


@pytest.mark.live
def test_q8_k_decodes_to_the_bits_of_ggml(ggml: ctypes.CDLL):
    blocks = random_blocks(GGMLType.Q8_K, 64)
    blocks[:, 3] = 0x3D  # scales between 0.03 and 0.13 or so
    expected = np.empty(64 * 256, np.float32)
    ggml.dequantize_row_q8_K(
        ctypes.c_void_p(blocks.ctypes.data), ctypes.c_void_p(expected.ctypes.data), ctypes.c_int64(expected.size)
    )
    assert_same_bits(decode(blocks.reshape(-1), GGMLType.Q8_K, expected.shape), expected)


def test_q8_1_is_its_scale_times_its_integers():
    scales, codes = np.array([0.25, 99.0], "<f2").view(np.uint8), np.arange(-16, 16, dtype=np.int8).view(np.uint8)
    values = decode(np.concatenate([scales, codes]), GGMLType.Q8_1, (32,))
    assert values.tolist() == [quant / 4 for quant in range(-16, 16)]


def test_q1_0_takes_the_sign_from_each_bit_and_q2_0_minus_one_to_two_from_each_pair():
    scale = np.array([0.5], "<f2").view(np.uint8)
    one, two = (np.concatenate([scale, np.full(16, bits, np.uint8)]) for bits in (0b101, 0b11_10_01_00))
    assert decode(one, GGMLType.Q1_0, (128,))[:9].tolist() == [0.5, -0.5, 0.5, -0.5, -0.5, -0.5, -0.5, -0.5, 0.5]
    assert decode(two, GGMLType.Q2_0, (64,))[:5].tolist() == [-0.5, 0.0, 0.5, 1.0, -0.5]


def test_f64_is_rounded_to_float32():
    values = decode(np.array([0.1, -2.5]).view(np.uint8), GGMLType.F64, (2,))
    assert values.dtype == np.float32
    assert values.tolist() == [float(np.float32(0.1)), -2.5]


def test_large_tensors_decode_in_pieces_to_the_same_values():
    blocks = random_blocks(GGMLType.Q8_0, 20_000)  # more than one piece
    blocks[:, 1] &= 0x3F  # finite scales
    whole = decode(blocks.reshape(-1), GGMLType.Q8_0, (20_000, 32))
    assert np.array_equal(whole[-3:], decode(blocks[-3:].reshape(-1), GGMLType.Q8_0, (3, 32)))


@pytest.fixture
def decoded_in_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The types that C decodes; each is checked again."""
    if library() is None:
        pytest.skip("NOT RUN: no C compiler")
    kinds: list[str] = []
    decode_into = CompiledMatrix.decode_into
    monkeypatch.setattr(
        CompiledMatrix, "decode_into", lambda self, *rest: kinds.append(self.kind) or decode_into(self, *rest)
    )
    compiled_decoder_is_right.cache_clear()
    yield kinds
    compiled_decoder_is_right.cache_clear()


def large_tensor(kind: GGMLType) -> tuple[np.ndarray, np.ndarray]:
    """Random bytes for just enough elements to be decoded in C, and their values."""
    raw, expected = random_blocks(kind, LARGE // BLOCK_SIZES[kind][0]), np.empty((LARGE // 512, 512), np.float32)
    decode_by_reference(raw, kind, expected)
    return raw, expected


@pytest.mark.parametrize("kind", COMPILED, ids=lambda kind: kind.name)
def test_large_tensor_is_decoded_in_c_to_the_bits_of_the_reference(kind: GGMLType, decoded_in_c: list[str]):
    raw, expected = large_tensor(kind)
    assert_same_bits(decode(raw, kind, expected.shape), expected)
    assert decoded_in_c == [kind.name] * 2  # first the check of the decoder
    n_small = LARGE // 512 - 1
    small = decode(raw.reshape(LARGE // 512, -1)[:n_small], kind, (n_small, 512))
    assert_same_bits(small, expected[:n_small])
    assert decoded_in_c == [kind.name] * 2


@pytest.mark.usefixtures("decoded_in_c")
def test_wrong_decoder_is_replaced_after_one_warning(monkeypatch, caplog):
    right = CompiledMatrix.decode_into

    def decode_wrongly(self: CompiledMatrix, first: int, out: np.ndarray) -> None:
        right(self, first, out)
        out[-1, -1] += 1

    monkeypatch.setattr(CompiledMatrix, "decode_into", decode_wrongly)
    (raw, expected), kind = large_tensor(GGMLType.Q5_K), GGMLType.Q5_K
    for _ in range(2):
        assert_same_bits(decode(raw, kind, expected.shape), expected)
    assert not compiled_decoder_is_right(kind)
    (line,) = caplog.messages
    assert_tells(line, "Q5_K", "NumPy")


def test_only_mxfp4_can_hide_a_nan_scale():
    block = np.zeros(17, np.uint8)
    assert not has_bad_scale(block, GGMLType.MXFP4)
    block[0] = 0xFF
    assert has_bad_scale(block, GGMLType.MXFP4)
    assert not has_bad_scale(np.full(36, 0x7F, np.uint8), GGMLType.NVFP4)


def test_the_type_numbers_agree_with_the_gguf_package():
    theirs, ours = ({kind.name: kind.value for kind in types} for types in (GGMLQuantizationType, GGMLType))
    assert theirs.items() <= ours.items()
    assert {kind for kind in GGML_QUANT_SIZES if BLOCK_SIZES[kind] != GGML_QUANT_SIZES[kind]} <= {GGMLType.Q8_1}


ROWS, WIDTH = 200, 512


def encoded(values: np.ndarray, ggml_type: GGMLType) -> np.ndarray:
    return np.concatenate([part.copy() for part in encode(values, ggml_type, name="x", path=Path("m"))])


def encoded_by_ggml(values: np.ndarray, ggml_type: GGMLType) -> np.ndarray:
    library = load_ggml()
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    out = np.zeros(encoded_size(values.shape, ggml_type), np.uint8)
    rows, width = values.shape
    written = library.ggml_quantize_chunk(ggml_type, values.ctypes.data, out.ctypes.data, 0, rows, width, None)
    assert written == out.size
    return out


def zeros_of_both_signs(rng: np.random.Generator) -> np.ndarray:
    return np.where(rng.random((ROWS, WIDTH)) < 0.5, 0.0, -0.0)


def mostly_zeros(rng: np.random.Generator) -> np.ndarray:
    return np.where(rng.random((ROWS, WIDTH)) < 0.7, zeros_of_both_signs(rng), np.abs(rng.normal(size=(ROWS, WIDTH))))


MADE = {
    "weights": lambda rng: rng.normal(size=(ROWS, WIDTH)) * 0.02,
    "heavy tails": lambda rng: rng.standard_t(2, (ROWS, WIDTH)),
    "integers": lambda rng: rng.integers(-16, 17, (ROWS, WIDTH)),
    "halves": lambda rng: rng.integers(-255, 256, (ROWS, WIDTH)) / 2,
    "ternary": lambda rng: rng.integers(-1, 2, (ROWS, WIDTH)),
    "zeros": lambda rng: np.zeros((ROWS, WIDTH)),
    "negative zeros": lambda rng: -np.zeros((ROWS, WIDTH)),
    "zeros of both signs": zeros_of_both_signs,
    "zeros and more": mostly_zeros,
    "zeros and less": lambda rng: -mostly_zeros(rng),
    "equal": lambda rng: np.full((ROWS, WIDTH), 0.3),
    "below float16": lambda rng: rng.normal(size=(ROWS, WIDTH)) * 1e-6,
    "tiny": lambda rng: rng.normal(size=(ROWS, WIDTH)) * 1e-30,
    "subnormal": lambda rng: rng.normal(size=(ROWS, WIDTH)) * 1e-40,
    "large": lambda rng: rng.uniform(-65504, 65504, (ROWS, WIDTH)),
    "bfloat16": lambda rng: (rng.normal(size=(ROWS, WIDTH)).astype(np.float32).view(np.uint32) & 0xFFFF0000).view("f4"),
    "any bits": lambda rng: rng.integers(0, 0x477F0000, (ROWS, WIDTH), np.uint32).view(np.float32),
}


@pytest.mark.live
@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("ggml_type", [one for one in LARGEST if one is not GGMLType.F32], ids=lambda kind: kind.name)
def test_the_bytes_are_those_of_ggml(ggml_type: GGMLType, kind: str):
    values = np.asarray(MADE[kind](np.random.default_rng(0)), np.float32)
    assert np.array_equal(encoded(values, ggml_type), encoded_by_ggml(values, ggml_type))


def test_f32_keeps_every_bit(rng: np.random.Generator):
    values = np.array([[0.0, -0.0, 1e-45, 3.4e38]], np.float32)
    assert encoded(values, GGMLType.F32).tobytes() == values.tobytes()


@pytest.mark.parametrize("ggml_type", LARGEST, ids=lambda kind: kind.name)
def test_a_number_at_the_limit_stays_finite_and_one_beyond_is_refused(ggml_type: GGMLType):
    limit = np.float32(LARGEST[ggml_type])
    values = np.zeros((1, 256), np.float32)
    values[0, 5], values[0, 77] = limit, -limit
    assert np.isfinite(decode(encoded(values, ggml_type), ggml_type, values.shape)).all()
    if limit < np.finfo(np.float32).max:
        beyond = np.nextafter(limit, np.float32(np.inf))
        with refuses("OutOfRange", where="x", expected=(f"{limit:.6g}", ggml_type.name), got=f"{beyond:.6g}"):
            encoded(np.where(values > 0, beyond, values), ggml_type)
        with np.errstate(over="ignore"):
            far = encoding._encode_chunk(values.reshape(-1) * np.float32(1.005), ggml_type)
        assert not np.isfinite(decode(far, ggml_type, values.shape)).all(), "the limit is lower than it need be"


def test_a_number_beyond_the_limit_is_refused_in_a_later_part_too():
    values = np.zeros((600, 1024), np.float32)  # three parts
    values[599, 1023] = 65536
    with refuses("OutOfRange", where="x", expected=(65504, "F16"), got=65536):
        encoded(values, GGMLType.F16)


@pytest.mark.parametrize("ggml_type", LARGEST, ids=lambda kind: kind.name)
def test_a_tensor_of_many_parts_equals_its_rows(rng: np.random.Generator, ggml_type: GGMLType):
    values = rng.normal(size=(600, 1024)).astype(np.float32)  # three parts, the last one short
    whole = encoded(values, ggml_type).reshape(600, -1)
    assert whole.size == encoded_size(values.shape, ggml_type)
    for row in (0, 255, 256, 599):
        assert np.array_equal(whole[row], encoded(values[row : row + 1], ggml_type))
