import numpy as np
import pytest
import torch
from builders.packed_matrices import activations, packed_matrix, raw_matrix
from helpers.kernel_tolerances import distance
from torch import nn
from torch.nn.functional import linear

from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.files.quant import decode as decode_with_numpy
from llorch.pytorch.kernels import packing, quantised_linear
from llorch.pytorch.kernels.packing import PACKERS, decode, four_bits, pack, six_bits, two_bits, width
from llorch.pytorch.kernels.quantised_linear import QuantisedEmbedding, QuantisedLinear, Reordered

OUT, IN = 37, 512
EVERY_TYPE = pytest.mark.parametrize("ggml_type", PACKERS, ids=lambda kind: kind.name)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def layer(ggml_type: GGMLType, bias: torch.Tensor | None = None) -> QuantisedLinear:
    made = QuantisedLinear(packed_matrix(ggml_type, OUT, IN), ggml_type)
    made.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@EVERY_TYPE
def test_packed_layer_equals_a_layer_with_decoded_weights(ggml_type, dtype):
    x, bias = activations(6, IN, dtype).view(2, 3, IN), torch.linspace(-1, 1, OUT).to(dtype)
    kernel = layer(ggml_type, bias)
    assert torch.equal(kernel(x), linear(x, decode(kernel.fields, ggml_type).to(dtype), bias))
    assert kernel(x).dtype is dtype


@EVERY_TYPE
def test_product_does_not_depend_on_tile_size(ggml_type, monkeypatch):
    kernel, x = layer(ggml_type, torch.linspace(-1, 1, OUT, dtype=torch.float64)), activations(3, IN, torch.float64)
    whole = kernel(x)
    monkeypatch.setattr(quantised_linear, "TILE", 5 * IN)
    torch.testing.assert_close(kernel(x), whole, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@EVERY_TYPE
def test_input_gradient_equals_a_layer_with_decoded_weights(ggml_type, dtype):
    x, grad = activations(6, IN, dtype).view(2, 3, IN).requires_grad_(), activations(6, OUT, dtype).view(2, 3, OUT)
    kernel = layer(ggml_type, torch.linspace(-1, 1, OUT).to(dtype))
    (expected,) = torch.autograd.grad(linear(x, decode(kernel.fields, ggml_type).to(dtype), kernel.bias), x, grad)
    made = kernel(x)
    (actual,) = torch.autograd.grad(made, x, grad)
    assert torch.equal(made, kernel(x.detach()))
    assert actual.dtype is dtype
    torch.testing.assert_close(actual, expected)


@EVERY_TYPE
def test_gradient_decodes_tiles_and_never_the_full_matrix(ggml_type, monkeypatch):
    kernel, x, decoded = layer(ggml_type), activations(3, IN, torch.float64).requires_grad_(), []
    (whole,) = torch.autograd.grad(kernel(x).square().sum(), x)
    monkeypatch.setattr(quantised_linear, "TILE", 5 * IN)
    monkeypatch.setattr(quantised_linear, "decode", lambda *args: decoded.append(decode(*args)) or decoded[-1])
    (tiled,) = torch.autograd.grad(kernel(x).square().sum(), x)
    torch.testing.assert_close(tiled, whole, rtol=1e-13, atol=1e-13)
    assert max(len(tile) for tile in decoded) == 5
    assert sum(len(tile) for tile in decoded) == 2 * OUT  # once forward, once back


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradient_tiles_are_summed_in_float32(dtype, monkeypatch):
    """Each tile's product is rounded once, and the sum once: two roundings, however many tiles there are."""
    n_out, unit = 600, torch.finfo(dtype).eps / 2
    fields, grad = packed_matrix(GGMLType.Q8_0, n_out, IN), activations(6, n_out, dtype)
    monkeypatch.setattr(quantised_linear, "TILE", IN)
    actual = quantised_linear.back_by_tiles(grad, fields, GGMLType.Q8_0)
    expected = grad.double() @ decode(fields, GGMLType.Q8_0).to(dtype).double()
    assert actual.dtype is dtype
    assert distance(actual, expected) < 2 * unit


def test_the_gradient_needs_no_backward_pass_of_the_kernel():
    kernel, x = layer(GGMLType.Q8_0), torch.ones(2, 3, IN, requires_grad=True)
    kernel.multiply = lambda x, fields, ggml_type, bias: x.new_full((len(x), OUT), 7.0)
    kernel(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, decode(kernel.fields, GGMLType.Q8_0).sum(0).expand(2, 3, IN))


def test_kernel_replaces_the_gradient():
    kernel, x = layer(GGMLType.Q8_0), torch.ones(2, 3, IN, requires_grad=True)
    kernel.multiply_back = lambda grad, fields, ggml_type: grad.new_full((len(grad), IN), 7.0)
    kernel(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2, 3, IN), 7.0))


@EVERY_TYPE
def test_embedding_returns_rows_of_the_matrix(ggml_type):
    fields, ids = packed_matrix(ggml_type, OUT, IN), torch.tensor([[3, 36, 0], [0, 11, 3]])
    kernel = QuantisedEmbedding(fields, ggml_type, torch.bfloat16)
    assert torch.equal(kernel(ids), decode(fields, ggml_type)[ids].bfloat16())


@EVERY_TYPE
def test_quantised_linear_dtype_change_keeps_the_fields(ggml_type):
    kernel = layer(ggml_type)
    before = decode(kernel.fields, ggml_type)
    assert torch.equal(decode(kernel.bfloat16().fields, ggml_type), before)


def test_layers_with_the_same_fields_share_memory():
    embedding = QuantisedEmbedding(packed_matrix(GGMLType.Q4_K, OUT, IN), GGMLType.Q4_K, torch.float32)
    head = QuantisedLinear(embedding.fields, GGMLType.Q4_K)
    for name, field in embedding.fields.items():
        assert head.fields[name].data_ptr() == field.data_ptr()


def test_kernel_replaces_the_product():
    kernel = layer(GGMLType.Q8_0)
    kernel.multiply = lambda x, fields, ggml_type, bias: x.new_full((len(x), OUT), 7.0)
    assert torch.equal(kernel(torch.zeros(2, 3, IN)), torch.full((2, 3, OUT), 7.0))


def test_packed_layer_repr_names_shape_and_type():
    assert repr(layer(GGMLType.Q6_K)) == "QuantisedLinear(Q6_K, out_features=37, in_features=512)"


def test_inputs_are_permuted_to_the_column_order():
    kernel, x = QuantisedLinear(packed_matrix(GGMLType.Q8_0, OUT, IN), GGMLType.Q8_0), torch.randn(3, IN)
    columns = torch.randperm(IN)
    torch.testing.assert_close(Reordered(kernel, columns)(x), x @ decode(kernel.fields, kernel.ggml_type)[:, columns].T)


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
def test_fields_take_no_more_bytes_than_the_file(ggml_type):
    raw, fields = raw_matrix(ggml_type, 5, 512), packed_matrix(ggml_type, 5, 512)
    assert sum(field.numel() * field.element_size() for field in fields.values()) == raw.size
    assert all(field.is_contiguous() and len(field) == 5 for field in fields.values())
    assert width(fields, ggml_type) == 512


@EVERY_TYPE
def test_any_rows_of_the_fields_decode_alone(ggml_type):
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
def test_reordered_bits_are_detected(broken, ggml_type, monkeypatch, rng):
    right = getattr(packing, broken)
    monkeypatch.setattr(packing, broken, lambda bits: right(bits.flip(-1)))
    raw = rng.integers(0, 256, (2, BLOCK_SIZES[ggml_type][1]), dtype=np.uint8)
    with pytest.raises(AssertionError):
        assert_same_bits(raw, ggml_type)
