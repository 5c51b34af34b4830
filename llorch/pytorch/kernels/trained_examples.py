"""Examples with which kernels with gradients are tried, see `llorch.pytorch.kernels.kernel_check`.

A result is that of the forward pass, with the gradients of its inputs for a random gradient of the result.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from llorch.families.config import ModelConfig
from llorch.pytorch.cache import NoCache, PassPlacement
from llorch.pytorch.causal_lm import RMSNorm, keep_nothing, rotate_and_cache, swiglu
from llorch.pytorch.device import Target
from llorch.pytorch.kernels.example import KernelExample, Numbers
from llorch.pytorch.kernels.packing import CPU_KIND_NAMES
from llorch.pytorch.kernels.quantised_linear import QuantisedLinear
from llorch.pytorch.random_weights import kind_named, random_fields

Size = tuple[int, int]  # batch, sequence


def _with_gradients(call: Callable[..., Sequence[Tensor]], n_results: int) -> Callable[..., tuple[Tensor, ...]]:
    """Extend a call by its backward pass; the last `n_results` arguments are the gradients of its results."""

    @torch.enable_grad()
    def both(kernel: object, *given: Tensor) -> tuple[Tensor, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in given[:-n_results]]
        made = call(kernel, *inputs)
        grads = torch.autograd.grad(made, inputs, given[-n_results:])
        return *(tensor.detach() for tensor in made), *grads

    return both


def _example_with_one_result(plain: object, *given: Tensor) -> KernelExample:
    """Make the example of a trained kernel that returns one tensor."""
    return KernelExample(
        plain,
        lambda dtype: [tuple(tensor.to(dtype) for tensor in given)],
        _with_gradients(lambda kernel, *inputs: (kernel(*inputs),), 1),
    )


def _norm(config: ModelConfig, at: Target, size: Size) -> KernelExample:
    numbers, width = Numbers(at), config.hidden_size
    plain = RMSNorm(width, config.rms_norm_eps)
    plain.weight = nn.Parameter(1 + numbers(width) / 2, requires_grad=False)
    return _example_with_one_result(plain, *(numbers(*size, width) for _ in range(2)))


def _act(config: ModelConfig, at: Target, size: Size) -> KernelExample:
    numbers, width = Numbers(at), config.intermediate_size
    return _example_with_one_result(swiglu, 4 * numbers(*size, width), *(numbers(*size, width) for _ in range(2)))


def _rotate(config: ModelConfig, at: Target, size: Size) -> KernelExample:
    numbers, half = Numbers(at), config.head_dim // 2
    given = [numbers(*size, n, config.head_dim) for n in (config.n_heads, config.n_kv_heads) * 2]
    positions = torch.arange(size[1], device=at.device).expand(size)
    angles = (positions[..., None] * torch.logspace(0, -4, half, device=at.device)).double()  # (batch, seq, half)

    def inputs(dtype: torch.dtype) -> list[tuple]:
        return [tuple(tensor.to(dtype) for tensor in given)]

    def turned(kernel: Callable, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        cos, sin = (table.float().to(wide) for table in (angles.cos(), angles.sin()))  # the same numbers in any dtype
        place = PassPlacement(positions, cos, sin, None, size[1])
        q, keys, _ = kernel(q, k, k.detach(), 0, place, NoCache(at.device), keep_nothing)
        return q, keys.transpose(1, 2)

    return KernelExample(rotate_and_cache, inputs, _with_gradients(turned, 2))


def _packed(name: str, config: ModelConfig, at: Target, size: Size) -> KernelExample:
    numbers, kind, n_in = Numbers(at), kind_named(name), -(-config.hidden_size // 256) * 256
    torch.manual_seed(0)
    plain = QuantisedLinear(random_fields((config.intermediate_size, n_in), kind, at.device), kind)
    return _example_with_one_result(plain, numbers(*size, n_in), numbers(*size, config.intermediate_size))


EXAMPLES: dict[str, Callable[[ModelConfig, Target, Size], KernelExample]] = {
    "norm": _norm, "rotate": _rotate, "act": _act,
    **{f"packed {name}": partial(_packed, name) for name in CPU_KIND_NAMES},
}  # fmt: skip
