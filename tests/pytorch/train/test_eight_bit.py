"""The 8-bit codec and step in torch: codes of the NumPy reference, bits of bitsandbytes, curve of 32 bits, memory."""

from pathlib import Path

import numpy as np
import pytest
import torch
from bitsandbytes_codes import kernel_book
from torch import Tensor, nn

from llorch.config import ModelConfig
from llorch.lora.adapter import wanted_shapes
from llorch.lora.config import LoraConfig
from llorch.pytorch.train.adamw import AdamW, Codec, zeros
from llorch.train.eight_bit import SIGNED, UNSIGNED, CodeBook, dequantise, quantise

HYPER = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
CPU = torch.device("cpu")
SHAPES = {"q_proj.lora_A": (8, 1000), "q_proj.lora_B": (700, 8), "v_proj.lora_B": (64, 64)}


@pytest.mark.parametrize("shape", [(4096,), (3, 77), (5, 256), (1,)])
@pytest.mark.parametrize("book", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
def test_codes_and_numbers_are_those_of_numpy(book: CodeBook, shape: tuple[int, ...], rng: np.random.Generator):
    x = (rng.standard_normal(shape) * 10.0 ** rng.uniform(-8, 0, shape)).astype(np.float32)
    x = x if book is SIGNED else abs(x)
    x.reshape(-1)[256:512] = 0
    x.reshape(-1)[1024:1280] *= np.float32(1e-38)
    want, got, codec = quantise(x, book), zeros(torch.from_numpy(x)), Codec(book, CPU)
    assert not codec.decode(got).any()
    codec.encode(torch.from_numpy(x), got)
    np.testing.assert_array_equal(got.codes.numpy(), want.codes)
    np.testing.assert_array_equal(got.absmax.numpy(), want.absmax)
    np.testing.assert_array_equal(codec.decode(got).numpy(), dequantise(want, book))


@pytest.mark.parametrize("book", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
def test_a_number_next_to_a_threshold_falls_on_its_own_side(book: CodeBook):
    """So no cell of the tables holds two thresholds; where it did, one of these would get the code of another."""
    sides = [
        np.nextafter(book.thresholds, np.float32(-2)),
        book.thresholds,
        np.nextafter(book.thresholds, np.float32(2)),
    ]
    x = np.stack([np.append(side, np.float32(1)) for side in sides])
    got = zeros(torch.from_numpy(x))
    Codec(book, CPU).encode(torch.from_numpy(x), got)
    want = np.arange(256)
    np.testing.assert_array_equal(got.codes.numpy(), [want, want, np.minimum(want + 1, 255)])


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradient(shape: torch.Size, generator: torch.Generator, *, dead_rows: bool) -> Tensor:
    """Of sizes over many decades; rows that never had one, as B = 0 gives them."""
    grad = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** 8
    if dead_rows:
        grad[: len(grad) // 2] = 0
    return grad


@pytest.mark.live
def test_parameters_codes_and_scales_are_those_of_bitsandbytes_bit_by_bit():
    optim = pytest.importorskip("bitsandbytes.optim", reason="NOT RUN: bitsandbytes is not installed")
    mine, theirs, generator = parameters(), parameters(), torch.Generator().manual_seed(1)
    ours = AdamW(mine, lr_ratio=1.0, eight_bit=True, **HYPER)
    ours.codecs = Codec(kernel_book(signed=True), CPU), Codec(kernel_book(signed=False), CPU)
    other = optim.AdamW8bit(theirs.values(), lr=1e-3, **HYPER)
    for step in range(1, 11):
        for name, parameter in mine.items():
            parameter.grad = gradient(parameter.shape, generator, dead_rows=step == 1 and name.endswith("A"))
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
        y = x @ params["q_proj.lora_A"].mT @ params["q_proj.lora_B"].mT
        loss = (y - x @ wanted.mT - noise).square().mean()
        ours.zero_grad()
        loss.backward()
        ours.clip(1.0)
        ours.step(2e-3)
        losses.append(loss.item())
    return np.array(losses)


def test_the_curve_of_a_hundred_steps_is_that_of_32_bits():
    want, got = curve(eight_bit=False), curve(eight_bit=True)
    assert want[0] > 1.9
    assert want[-1] < 1.2
    assert 0 < (abs(got - want) / want).max() < 1e-3


QWEN_05B = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 32768, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip


def test_an_adapter_of_all_matrices_takes_at_most_2_1_bytes_per_parameter():
    model = ModelConfig.from_huggingface(QWEN_05B, path=Path("config.json"))
    shapes = wanted_shapes(LoraConfig(r=8), model)
    params = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    n_parameters = sum(parameter.numel() for parameter in params.values())
    assert n_parameters == 4_399_104
    state = AdamW(params, lr_ratio=1.0, eight_bit=True, **HYPER).state()
    assert 2 < sum(tensor.nbytes for tensor in state.values()) / n_parameters <= 2.1
