"""The gated delta net in torch: the rule beside a loop, padding, passes, gradients."""

import pytest
import torch
from helpers.kernel_tolerances import distance
from torch import Tensor

from llorch.pytorch.models import delta_rule as module
from llorch.pytorch.models.delta_net import ShortConv
from llorch.pytorch.models.delta_rule import CHUNK, delta_rule

K_HEADS, V_HEADS, KEY, VALUE = 2, 6, 8, 5


def delta_rule_inputs(seq: int, *, strong: bool = True, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values, beta, log decay of two sequences, and a state; some decays leave nothing."""
    draw = torch.Generator().manual_seed(seq)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(random(2, seq, K_HEADS, KEY), dim=-1) for _ in "qk")
    log_decay = -random(2, seq, V_HEADS).abs()
    if strong:
        log_decay = torch.where(random(2, seq, V_HEADS) > 1, log_decay - 316, log_decay)
    state = random(2, V_HEADS, KEY, VALUE)
    made = q, k, random(2, seq, V_HEADS, VALUE), random(2, seq, V_HEADS).sigmoid(), log_decay, state
    return [tensor.to(dtype) for tensor in made]


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """As the formula is written, head by head."""
    out, state = torch.zeros_like(v), state.clone()
    for b in range(len(q)):
        for h in range(V_HEADS):
            s = state[b, h]
            for t in range(q.shape[1]):
                key, query = (x[b, t, h // (V_HEADS // K_HEADS)] for x in (k, q))
                s = s * log_decay[b, t, h].exp()
                s = s + torch.outer(key, beta[b, t, h] * (v[b, t, h] - s.T @ key))
                out[b, t, h] = s.T @ query / KEY**0.5
            state[b, h] = s
    return out, state


@pytest.mark.parametrize("seq", [1, 3, CHUNK, CHUNK + 7])
def test_few_and_many_tokens_follow_the_formula(seq: int) -> None:
    for actual, expected in zip(delta_rule(*delta_rule_inputs(seq)), one_by_one(*delta_rule_inputs(seq)), strict=True):
        assert distance(actual, expected) < 1e-13


def test_float32_keeps_values_after_a_strong_decay() -> None:
    exact = delta_rule_inputs(CHUNK, dtype=torch.float32)
    for actual, expected in zip(delta_rule(*exact), one_by_one(*(x.double() for x in exact)), strict=True):
        assert distance(actual, expected) < 3e-7


def test_state_does_not_depend_on_pass_lengths() -> None:
    q, k, v, beta, log_decay, state = delta_rule_inputs(3 * CHUNK)
    expected, end = delta_rule(q, k, v, beta, log_decay, state)
    made, start = [], 0
    for stop in (1, CHUNK + 2, CHUNK + 5, 3 * CHUNK):
        at = slice(start, stop)
        out, state = delta_rule(q[:, at], k[:, at], v[:, at], beta[:, at], log_decay[:, at], state)
        made.append(out)
        start = stop
    assert distance(torch.cat(made, 1), expected) < 1e-13
    assert distance(state, end) < 1e-13


def test_gradients_flow_through_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 3)  # then five tokens are two chunks
    assert torch.autograd.gradcheck(delta_rule, [x[:1].requires_grad_() for x in delta_rule_inputs(5)])


def test_convolution_skips_padding_at_any_position() -> None:
    torch.manual_seed(0)
    conv = ShortConv(5, 4).double()
    torch.nn.init.normal_(conv.weight)
    x, before = torch.randn(1, 4, 5, dtype=torch.float64), torch.randn(1, 3, 5, dtype=torch.float64)
    expected, last = conv(x, before, None)
    real = torch.tensor([[False, True, True, False, False, True, False, True]])
    padded = torch.full((1, 8, 5), 1e9, dtype=torch.float64)
    padded[real] = x[0]
    actual, state = conv(padded, before, real)
    torch.testing.assert_close(actual[real], expected[0], rtol=0, atol=1e-15)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-15)


def test_pass_of_padding_only_changes_nothing() -> None:
    conv, before = ShortConv(5, 4), torch.randn(2, 3, 5)
    torch.nn.init.normal_(conv.weight)
    _, last = conv(torch.randn(2, 2, 5), before, torch.zeros(2, 2, dtype=torch.bool))
    assert torch.equal(last, before)
