"""The loss against torch's cross entropy over all logits: values, gradients, rows that never become logits."""

import numpy as np
import pytest
import torch
from builders.random_adapters import random_adapter
from helpers.training_passes import CPU, base
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from llorch.pytorch.lora.adapters import activate, attach, trainable_parameters
from llorch.pytorch.train.forward import hidden_states
from llorch.pytorch.train.loss import loss_sum
from llorch.training.batch import IGNORED, Batch

CHUNKS = pytest.mark.parametrize("chunk", [None, 1, 4, 1000])
LIMITS = {  # dtype of the loss; its distance, and that of each gradient
    torch.float64: (torch.float64, 1e-13, 1e-13),
    torch.float32: (torch.float32, 1e-6, 1e-6),
    torch.bfloat16: (torch.float32, 1e-6, 2**-7),  # each gradient is rounded to 8 bits several times
}


class CountingHead(nn.Module):
    """A head that remembers how many rows it was given at a time, and whether a gradient was wanted."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.head, self.rows, self.wanted = head, list[int](), list[bool]()

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        self.wanted.append(torch.is_grad_enabled())
        return self.head(x)


def make_problem(dtype: torch.dtype) -> tuple[Tensor, nn.Linear, Tensor]:
    """Hidden states, a head that is trained, labels of which about a third are ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 11, 16, generator=generator, dtype=dtype).requires_grad_()
    head = nn.Linear(16, 70, bias=False, dtype=dtype)
    nn.init.normal_(head.weight, generator=generator)
    labels = torch.randint(0, 70, (3, 11), generator=generator)
    labels[torch.rand(3, 11, generator=generator) < 0.3] = IGNORED
    labels[1, :7] = IGNORED
    return hidden, head, labels


def torch_loss(hidden: Tensor, head: nn.Module, labels: Tensor, smoothing: float) -> Tensor:
    """All logits, shifted by slices, in at least float32."""
    logits = head(hidden)[:, :-1].flatten(0, 1)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    kind = {"ignore_index": IGNORED, "reduction": "sum", "label_smoothing": smoothing}
    return cross_entropy(wide, labels[:, 1:].flatten(), **kind)


def gradients(loss: Tensor, *of: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss / 7, of))


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).detach().double().norm() / expected.detach().double().norm())


@CHUNKS
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("dtype", LIMITS)
def test_chunked_loss_and_gradients_equal_torch_over_all_logits(
    dtype: torch.dtype, smoothing: float, chunk: int | None
):
    (hidden, head, labels), (wide, of_loss, of_gradient) = make_problem(dtype), LIMITS[dtype]
    expected = torch_loss(hidden, head, labels, smoothing)
    actual = loss_sum(hidden, head, labels, label_smoothing=smoothing, chunk=chunk)
    assert actual.dtype == wide
    assert distance(actual, expected) < of_loss, "a softmax in bfloat16 is off by some 1e-3"
    pairs = zip(gradients(actual, hidden, head.weight), gradients(expected, hidden, head.weight), strict=True)
    for mine, theirs in pairs:
        assert mine.dtype == dtype
        assert distance(mine, theirs) < of_gradient


@pytest.mark.parametrize("chunk", [1, 4, 10, 1000])
def test_logits_are_computed_only_for_labelled_rows_one_chunk_at_a_time(chunk: int):
    hidden, head, labels = make_problem(torch.float32)
    counted, n_trained = CountingHead(head), int((labels[:, 1:] != IGNORED).sum())
    assert n_trained < 0.8 * labels.numel()
    loss_sum(hidden, counted, labels, label_smoothing=0.1, chunk=chunk).backward()
    assert sum(counted.rows) == n_trained, "each row once, also in the backward pass"
    assert max(counted.rows) == min(chunk, n_trained)


@CHUNKS
def test_large_logits_make_no_infinity(chunk: int | None):
    hidden, head, labels = make_problem(torch.float32)
    far = hidden.detach() * 1e4
    far.requires_grad_()
    expected = torch_loss(far, head, labels, 0.1)
    actual = loss_sum(far, head, labels, label_smoothing=0.1, chunk=chunk)
    assert distance(actual, expected) < 1e-6
    assert distance(gradients(actual, far)[0], gradients(expected, far)[0]) < 1e-5


@CHUNKS
def test_a_batch_without_trained_tokens_adds_nothing(chunk: int | None):
    hidden, head, labels = make_problem(torch.float32)
    labels[:] = IGNORED
    labels[:, 0] = 3  # nothing predicts the first token
    loss = loss_sum(hidden, head, labels, label_smoothing=0.1, chunk=chunk)
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()


@CHUNKS
def test_loss_is_equal_without_gradients(chunk: int | None):
    hidden, head, labels = make_problem(torch.float64)
    expected = torch_loss(hidden, head, labels, 0.1)
    counted = CountingHead(head)
    with torch.no_grad():
        actual = loss_sum(hidden, counted, labels, label_smoothing=0.1, chunk=chunk)
    assert not any(counted.wanted), "time spent on gradients that nobody wants"
    assert distance(actual, expected) < 1e-13
    assert chunk is None or max(counted.rows) <= chunk


ADAPTED = {
    "tied": ("micro-qwen2", {"target_modules": ("q_proj", "lm_head")}),
    "untied": ("micro-llama", {"target_modules": ("lm_head",)}),
    "dora": ("micro-llama", {"target_modules": ("lm_head", "v_proj"), "use_dora": True}),
    "head frozen": ("micro-qwen2", {"target_modules": ("q_proj", "embed_tokens")}),
}


@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("kind", ADAPTED)
def test_an_adapted_head_gets_the_same_gradients_in_chunks(kind: str, chunk: int):
    name, settings = ADAPTED[kind]
    module = base(name, torch.float64)
    attach(module, random_adapter(module.config, **settings), trainable=True)
    of, found = ragged_batch([7, 12, 4]), {}
    for each in (None, chunk):
        hidden = hidden_states(module, of, CPU)
        loss = loss_sum(hidden, module.lm_head, torch.from_numpy(of.labels), label_smoothing=0.1, chunk=each)
        (loss / of.n_trained).backward()
        found[each] = [loss, *(take_gradient(p) for p in trainable_parameters(module).values())]
    for actual, expected in zip(found[chunk], found[None], strict=True):
        assert bool(expected.any())
        assert distance(actual, expected) < 1e-12


def test_disabled_adapter_gets_no_gradient():
    module = base("micro-llama", torch.float64)
    for name in ("first", "second"):
        attach(module, random_adapter(module.config, target_modules=("lm_head",)), name=name, trainable=True)
    activate(module, "first")
    of = ragged_batch([7, 12])
    labels = torch.from_numpy(of.labels)
    loss_sum(hidden_states(module, of, CPU), module.lm_head, labels, label_smoothing=0.0, chunk=3).backward()
    assert all(parameter.grad is not None for parameter in trainable_parameters(module, "first").values())
    assert all(parameter.grad is None for parameter in trainable_parameters(module, "second").values())


def take_gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    grad, parameter.grad = parameter.grad, None
    return grad


def ragged_batch(lengths: list[int], first: int = 0) -> Batch:
    """One document a row, a third of its labels ignored; row `i` is the same in every batch that has it."""
    seq = max(lengths)
    ids, positions = np.zeros((len(lengths), seq), np.int64), np.full((len(lengths), seq), -1)
    labels = np.full_like(ids, IGNORED)
    for row, length in enumerate(lengths):
        rng = np.random.default_rng(first + row)
        ids[row, :length], positions[row, :length] = rng.integers(0, 300, length), np.arange(length)
        labels[row, 1:length] = np.where(rng.random(length - 1) < 0.3, IGNORED, ids[row, 1:length])
    return Batch(ids, labels, positions, np.where(positions < 0, -1, 0), np.arange(len(ids)))
