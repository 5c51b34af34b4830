"""Moments of 8 bits: values and bits of bitsandbytes, the nearest code, zeros that stay, curve of 32 bits, memory."""

import numpy as np
import pytest
import torch
from helpers.bitsandbytes_codes import kernel_book, kernel_codes
from torch import Tensor, nn

from llorch.lora.adapter import expected_shapes
from llorch.lora.config import LoraConfig
from llorch.pytorch.train.adamw import AdamW
from llorch.pytorch.train.eight_bit import BLOCK, SIGNED, UNSIGNED, CodeBook, Codec, EightBit, zeros
from tests.lora.test_initial import qwen_05b

BOOKS = pytest.mark.parametrize("book", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
HYPER = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
CPU = torch.device("cpu")
SHAPES = {"q_proj.lora_A": (8, 1000), "q_proj.lora_B": (700, 8), "v_proj.lora_B": (64, 64)}


def random_values(
    book: CodeBook, rng: np.random.Generator, shape: int | tuple[int, ...] = 5 * BLOCK + 37
) -> np.ndarray:
    """Over eight decades, of the signs that the book has."""
    x = (rng.standard_normal(shape) * 10.0 ** rng.uniform(-8, 0, shape)).astype(np.float32)
    return x if book is SIGNED else abs(x)


def encode(x: np.ndarray, book: CodeBook) -> EightBit:
    made = zeros(torch.from_numpy(x))
    Codec(book, CPU).encode(torch.from_numpy(x), made)
    return made


def round_trip(x: np.ndarray, book: CodeBook) -> np.ndarray:
    return Codec(book, CPU).decode(encode(x, book)).numpy()


@BOOKS
def test_a_book_has_256_different_values_from_its_lowest_to_one(book: CodeBook):
    assert book.values.shape == (256,)
    assert (np.diff(book.values) > 0).all()
    assert 0 in book.values
    assert book.values[-1] == 1
    np.testing.assert_allclose(book.values[0], -0.99296875 if book is SIGNED else 0, rtol=1e-6)


def test_the_smallest_decade_worked_by_hand():
    np.testing.assert_allclose(SIGNED.values[SIGNED.values > 0][:3], [0.55e-6, 3.25e-6, 7.75e-6], rtol=1e-6)
    np.testing.assert_allclose(UNSIGNED.values[1:3], [3.25e-7, 7.75e-7], rtol=1e-6)


@BOOKS
@pytest.mark.parametrize("shape", [(4096,), (3, 77), (5, 256), (1,)])
def test_codes_equal_a_nearest_value_search_and_zero_blocks_stay_zero(
    book: CodeBook, shape: tuple[int, ...], rng: np.random.Generator
):
    x = random_values(book, rng, shape)
    x.reshape(-1)[256:512] = 0
    x.reshape(-1)[1024:1280] *= np.float32(1e-38)  # too small for a reciprocal
    actual = encode(x, book)
    blocks = np.pad(x.reshape(-1), (0, -x.size % BLOCK)).reshape(-1, BLOCK)
    absmax = np.where(abs(blocks).max(-1) < np.finfo(np.float32).tiny, 0, abs(blocks).max(-1))
    np.testing.assert_array_equal(actual.absmax.numpy(), absmax)
    live = np.repeat(absmax > 0, BLOCK)[: x.size]
    scale = np.repeat(absmax, BLOCK)[: x.size][live]
    codes = actual.codes.numpy().reshape(-1)
    wanted = np.searchsorted(book.thresholds, x.reshape(-1)[live] * (np.float32(1) / scale))
    np.testing.assert_array_equal(codes[live], wanted)
    assert not codes[~live].any()
    back = Codec(book, CPU).decode(actual).numpy().reshape(-1)
    np.testing.assert_array_equal(back[live], book.values[wanted] * scale)
    assert not back[~live].any()
    nearest = abs((x.reshape(-1)[live] / scale.astype(np.float64))[:, None] - book.values).min(-1)
    error = abs(x.reshape(-1)[live] / scale.astype(np.float64) - book.values[wanted])
    np.testing.assert_allclose(error, nearest, rtol=0, atol=2**-23)  # at a tie, by a rounded division


@BOOKS
def test_error_is_small_relative_to_the_value_and_the_block(book: CodeBook, rng: np.random.Generator):
    x = random_values(book, rng)
    actual, largest = round_trip(x, book), np.repeat(encode(x, book).absmax.numpy(), BLOCK)[: len(x)]
    assert (abs(actual - x) <= 0.5 * abs(x) + 1e-6 * largest).all()
    assert (abs(actual - x) <= 0.0072 * largest).all()


@BOOKS
def test_codebook_values_and_zeros_round_trip_exactly(book: CodeBook):
    np.testing.assert_array_equal(encode(book.values, book).codes.numpy(), np.arange(256))
    x = np.zeros(BLOCK, np.float32)
    x[7] = 0.3
    for given in (book.values, x):
        np.testing.assert_array_equal(round_trip(given, book), given)


@BOOKS
def test_number_next_to_a_threshold_rounds_to_its_side(book: CodeBook):
    """So no cell of the tables holds two thresholds; where it did, one of these would get the code of another."""
    below, above = (np.nextafter(book.thresholds, np.float32(towards)) for towards in (-2, 2))
    x = np.stack([np.append(side, np.float32(1)) for side in [below, book.thresholds, above]])
    expected = np.arange(256)
    np.testing.assert_array_equal(encode(x, book).codes.numpy(), [expected, expected, np.minimum(expected + 1, 255)])


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def random_gradient(shape: torch.Size, generator: torch.Generator, *, dead_rows: bool) -> Tensor:
    """Of sizes over many decades; rows that never had one, as B = 0 gives them."""
    grad = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** 8
    if dead_rows:
        grad[: len(grad) // 2] = 0
    return grad


@pytest.mark.live
@BOOKS
def test_values_codes_and_thresholds_equal_bitsandbytes(book: CodeBook, rng: np.random.Generator):
    theirs, x = kernel_book(signed=book is SIGNED), random_values(book, rng, 1000 * BLOCK + 37)
    np.testing.assert_allclose(book.values, theirs.values, rtol=2.5e-7, atol=0)  # 2 ulp: its grid is float32
    np.testing.assert_array_equal(encode(x, theirs).codes.numpy(), kernel_codes(x, theirs.values))
    reached = theirs.thresholds > -1
    assert (abs(theirs.thresholds - book.thresholds)[reached] <= 2 / 65535).all()  # one step of its table


def test_a_step_uses_the_moments_before_they_are_rounded():
    made = {}
    for eight_bit in (False, True):
        made[eight_bit] = parameters()
        ours = AdamW(made[eight_bit], lr_ratio=1.0, eight_bit=eight_bit, **HYPER)
        for step in (1, 2):
            for parameter in made[eight_bit].values():
                parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9))
            ours.step(1e-3)
            made[eight_bit, step] = [parameter.detach().clone() for parameter in made[eight_bit].values()]
    assert all(torch.equal(one, other) for one, other in zip(made[False, 1], made[True, 1], strict=True))
    assert 0 < max(float((x - y).abs().max()) for x, y in zip(made[False, 2], made[True, 2], strict=True)) < 1e-3


@pytest.mark.live
def test_parameters_codes_and_scales_equal_bitsandbytes_bit_for_bit():
    optim = pytest.importorskip("bitsandbytes.optim", reason="NOT RUN: bitsandbytes is not installed")
    mine, theirs, generator = parameters(), parameters(), torch.Generator().manual_seed(1)
    ours = AdamW(mine, lr_ratio=1.0, eight_bit=True, **HYPER)
    ours.codecs = Codec(kernel_book(signed=True), CPU), Codec(kernel_book(signed=False), CPU)
    other = optim.AdamW8bit(theirs.values(), lr=1e-3, **HYPER)
    for step in range(1, 11):
        for name, parameter in mine.items():
            parameter.grad = random_gradient(parameter.shape, generator, dead_rows=step == 1 and name.endswith("A"))
            theirs[name].grad = parameter.grad.clone()
        ours.step(1e-3)
        other.step()
        state = ours.state()
        for name, parameter in theirs.items():
            assert torch.equal(mine[name], parameter), (step, name)
            for kind, number in (("m", 1), ("v", 2)):
                assert torch.equal(state[f"{name}.{kind}"], other.state[parameter][f"state{number}"]), (step, name)
                assert torch.equal(state[f"{name}.{kind}_absmax"], other.state[parameter][f"absmax{number}"])


def curve(*, eight_bit: bool) -> np.ndarray:
    """Losses of 100 steps of one adapted matrix, which learns another one from ever new noisy examples."""
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(96, 64, generator=generator) / 8
    lora_A = nn.Parameter((torch.rand(64, 64, generator=generator) * 2 - 1) / 8)
    params = {"q_proj.lora_A": lora_A, "q_proj.lora_B": nn.Parameter(torch.zeros(96, 64))}
    ours, losses = AdamW(params, lr_ratio=1.0, eight_bit=eight_bit, **HYPER), []
    for _ in range(100):
        x, noise = torch.randn(256, 64, generator=generator), torch.randn(256, 96, generator=generator)
        loss = (x @ params["q_proj.lora_A"].mT @ params["q_proj.lora_B"].mT - x @ wanted.mT - noise).square().mean()
        ours.zero_grad()
        loss.backward()
        ours.clip(1.0)
        ours.step(2e-3)
        losses.append(loss.item())
    return np.array(losses)


def test_loss_curve_of_a_hundred_steps_equals_32_bits():
    expected, actual = curve(eight_bit=False), curve(eight_bit=True)
    assert expected[0] > 1.9
    assert expected[-1] < 1.2
    assert 0 < (abs(actual - expected) / expected).max() < 1e-3


def test_an_adapter_of_all_matrices_takes_at_most_2_1_bytes_per_parameter():
    shapes = expected_shapes(LoraConfig(r=8), qwen_05b())
    params = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    n_parameters = sum(parameter.numel() for parameter in params.values())
    assert n_parameters == 4_399_104
    state = AdamW(params, lr_ratio=1.0, eight_bit=True, **HYPER).state()
    assert 2 < sum(tensor.nbytes for tensor in state.values()) / n_parameters <= 2.1
