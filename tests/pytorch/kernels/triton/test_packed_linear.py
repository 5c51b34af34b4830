"""Packed layers of one input that share a launch, in Triton's interpreter or on a device."""

import gc
import os
from weakref import ref

import pytest
import torch
from builders.packed_matrices import activations, packed_matrix, packed_table
from builders.table_matrices import TABLES
from torch import nn

from llorch.files.quant import GGMLType
from llorch.pytorch.kernels.packing import Fields, Kind
from llorch.pytorch.kernels.quantised_linear import QuantisedLinear

pytest.importorskip("triton", reason="NOT RUN: triton is not installed")

from llorch.pytorch.kernels.triton import kernels
from llorch.pytorch.kernels.triton.kernels import PackedLinear, join_alike

SIZES = (6, 2, 3)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "interpreter" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("NOT RUN: the interpreter is off where there is a device")
    return "cpu" if request.param == "interpreter" else "cuda"


def matrix(name: str, rows: int, device: str) -> tuple[Fields, Kind]:
    if name in TABLES:
        return packed_table(name, rows, 768, device)
    return packed_matrix(GGMLType[name], rows, 768, device), GGMLType[name]


def make_layers(names: tuple[str, ...], device: str, *, bias: bool = False) -> list[QuantisedLinear]:
    made = [QuantisedLinear(*matrix(name, rows, device)) for name, rows in zip(names, SIZES, strict=True)]
    for layer in made:
        if bias:
            layer.bias = nn.Parameter(torch.linspace(-1, 1, layer.out_features, device=device), requires_grad=False)
    return made


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of the matrix of each launch that layers share."""
    seen: list[int] = []

    def noted(x: torch.Tensor, fields: Fields, kind: Kind, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(len(fields["codes"]))
        return multiply_few_rows(x, fields, kind, bias)

    multiply_few_rows = kernels.multiply_few_rows
    monkeypatch.setattr(kernels, "multiply_few_rows", noted)
    return seen


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "AWQ", "MLX 8", "FP8"])
def test_equal_kinds_of_matrices_of_one_input_share_a_launch(name, bias, device, launches):
    layers = make_layers((name,) * 3, device, bias=bias)
    joined = [PackedLinear(layer) for layer in layers]
    wanted = [PackedLinear(layer) for layer in layers]
    join_alike(joined)
    x = activations(1, 768, torch.float32, device)[None]
    for ours, alone, plain in zip(joined, wanted, layers, strict=True):
        actual = ours(x)
        assert torch.equal(actual, alone(x))
        torch.testing.assert_close(actual, plain(x), rtol=1e-5, atol=1e-5)
    assert launches == [sum(SIZES)]


def test_matrices_of_other_kinds_are_multiplied_alone(device, launches):
    layers = [PackedLinear(layer) for layer in make_layers(("Q4_K", "Q4_K", "Q6_K"), device)]
    join_alike(layers)
    assert [layer.shared_launch is None for layer in layers] == [False, False, True]
    x = activations(1, 768, torch.float32, device)
    for layer in layers:
        torch.testing.assert_close(layer(x), QuantisedLinear(layer.fields, layer.ggml_type)(x), rtol=1e-5, atol=1e-5)
    assert launches == [SIZES[0] + SIZES[1]]


def test_joined_matrices_take_no_more_memory(device):
    layers = [PackedLinear(layer) for layer in make_layers(("Q8_0",) * 3, device)]
    join_alike(layers)
    for name in layers[0].fields:
        assert len({layer.get_buffer(name).untyped_storage().data_ptr() for layer in layers}) == 1


def test_several_rows_float64_and_gradients_are_multiplied_alone(device, launches):
    layers = [PackedLinear(layer) for layer in make_layers(("Q8_0",) * 3, device)]
    join_alike(layers)
    for x in (
        activations(2, 768, torch.float32, device),
        activations(1, 768, torch.float64, device),
        activations(1, 768, torch.float32, device).requires_grad_(),
    ):
        for layer in layers:
            wanted = QuantisedLinear(layer.fields, layer.ggml_type)(x)
            torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-5)
    assert not launches


@pytest.mark.parametrize("name", ["codes", "d"])
@pytest.mark.parametrize("moved", [0, 1])
def test_layers_that_were_moved_multiply_by_their_own_matrices(moved, name, device, launches):
    layers = [PackedLinear(layer) for layer in make_layers(("Q8_0",) * 3, device)]
    join_alike(layers)
    layers[moved].register_buffer(name, layers[moved].get_buffer(name).clone().zero_())
    assert not layers[moved](activations(1, 768, torch.float32, device)).any()
    assert not launches


def test_joined_layers_add_the_bias_that_they_have(device):
    layers = [PackedLinear(layer) for layer in make_layers(("Q8_0",) * 3, device, bias=True)]
    join_alike(layers)
    x = activations(1, 768, torch.float32, device)
    before = [layer(x) for layer in layers]
    for layer in layers:
        assert layer.bias is not None
        layer.bias.add_(100)
    for layer, product in zip(layers, before, strict=True):
        torch.testing.assert_close(layer(x), product + 100, rtol=1e-5, atol=1e-5)


def test_strided_row_is_multiplied(device):
    layers = [PackedLinear(layer) for layer in make_layers(("Q8_0",) * 3, device)]
    join_alike(layers)
    x = activations(1, 2 * 768, torch.float32, device)
    for layer in layers:
        assert torch.equal(layer(x[:, ::2]), layer(x[:, ::2].contiguous()))


def test_inputs_of_another_width_raise_as_without_joining(device):
    layers = [PackedLinear(layer) for layer in make_layers(("Q8_0",) * 3, device)]
    for join in (lambda same: None, join_alike):
        join(layers)
        with pytest.raises(RuntimeError):
            layers[0](activations(1, 256, torch.float32, device))


def test_joined_layers_end_with_their_last_reference(device):
    layers = [PackedLinear(layer) for layer in make_layers(("Q8_0",) * 3, device)]
    join_alike(layers)
    fields = ref(layers[0].get_buffer("codes"))
    gc.disable()
    try:
        del layers
        assert fields() is None
    finally:
        gc.enable()
