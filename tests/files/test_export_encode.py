"""Encoding to ggml's types: the bytes of ggml's own quantisers, and numbers that a type cannot hold."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
from helpers.ggml_library import load_ggml
from helpers.refusals import refuses

from llorch.files import encode as encoding
from llorch.files.encode import LARGEST, encode, encoded_size
from llorch.files.quant import GGMLType, decode

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
@pytest.mark.parametrize("ggml_type", [one for one in LARGEST if one is not GGMLType.F32], ids=lambda one: one.name)
def test_the_bytes_are_those_of_ggml(ggml_type: GGMLType, kind: str):
    values = np.asarray(MADE[kind](np.random.default_rng(0)), np.float32)
    assert np.array_equal(encoded(values, ggml_type), encoded_by_ggml(values, ggml_type))


def test_f32_keeps_every_bit(rng: np.random.Generator):
    values = np.array([[0.0, -0.0, 1e-45, 3.4e38]], np.float32)
    assert encoded(values, GGMLType.F32).tobytes() == values.tobytes()


@pytest.mark.parametrize("ggml_type", LARGEST, ids=lambda one: one.name)
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
            far = encoding._encode_part(values.reshape(-1) * np.float32(1.005), ggml_type)
        assert not np.isfinite(decode(far, ggml_type, values.shape)).all(), "the limit is lower than it need be"


def test_a_number_beyond_the_limit_is_refused_in_a_later_part_too():
    values = np.zeros((600, 1024), np.float32)  # three parts
    values[599, 1023] = 65536
    with refuses("OutOfRange", where="x", expected=(65504, "F16"), got=65536):
        encoded(values, GGMLType.F16)


@pytest.mark.parametrize("ggml_type", LARGEST, ids=lambda one: one.name)
def test_a_tensor_of_many_parts_equals_its_rows(rng: np.random.Generator, ggml_type: GGMLType):
    values = rng.normal(size=(600, 1024)).astype(np.float32)  # three parts, the last one short
    whole = encoded(values, ggml_type).reshape(600, -1)
    assert whole.size == encoded_size(values.shape, ggml_type)
    for row in (0, 255, 256, 599):
        assert np.array_equal(whole[row], encoded(values[row : row + 1], ggml_type))
