"""Examples with which kernels with gradients, and kernels of delta nets and experts, are tried; see `kernel_check`.

A result of a kernel with gradients is that of the forward pass, with the gradients of its inputs for a random gradient
of the result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llorch.families.config import ModelConfig
from llorch.pytorch.cache import NoCache, PassPlacement
from llorch.pytorch.causal_lm import RMSNorm, keep_nothing, rotate_and_cache, swiglu, widened
from llorch.pytorch.device import Target
from llorch.pytorch.kernels.packing import CPU_KIND_NAMES, KIND_NAMES
from llorch.pytorch.kernels.quantised_linear import QuantisedLinear
from llorch.pytorch.models.delta_net import GatedNorm, ShortConv, l2_norm
from llorch.pytorch.models.delta_rule import delta_rule
from llorch.pytorch.models.experts import ExpertLinear, QuantisedExperts
from llorch.pytorch.random_weights import kind_named, random_fields


@dataclass(frozen=True)
class KernelExample:
    """A module of torch and the inputs with which it is called."""

    plain: Any
    inputs: Callable[[torch.dtype], Sequence[tuple]]  # the same numbers in any dtype; the first are those of decoding
    call: Callable[..., Tensor | tuple[Tensor, ...]] = lambda kernel, *given: kernel(*given)
    wide: torch.dtype = torch.float64  # in which torch's module is the reference


class Numbers:
    """Random numbers in a dtype, on a device."""

    def __init__(self, at: Target) -> None:
        """Begin with the same ones every time."""
        self.at, self.generator = at, torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        """Draw normal random numbers of size 1."""
        return torch.randn(*shape, generator=self.generator).to(self.at.device, self.at.dtype)


Size = tuple[int, int]  # batch, sequence


def in_dtype(*inputs: tuple[Tensor, ...]) -> Callable[[torch.dtype], list[tuple]]:
    """Return the function that gives inputs in a dtype."""
    return lambda dtype: [tuple(tensor.to(dtype) for tensor in tensors) for tensors in inputs]


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
    return KernelExample(plain, in_dtype(given), _with_gradients(lambda kernel, *inputs: (kernel(*inputs),), 1))


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
    given = tuple(numbers(*size, n, config.head_dim) for n in (config.n_heads, config.n_kv_heads) * 2)
    positions = torch.arange(size[1], device=at.device).expand(size)
    angles = (positions[..., None] * torch.logspace(0, -4, half, device=at.device)).double()  # (batch, seq, half)

    def turned(kernel: Callable, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        cos, sin = (table.float().to(wide) for table in (angles.cos(), angles.sin()))  # the same numbers in any dtype
        place = PassPlacement(positions, cos, sin, None, size[1])
        q, keys, _ = kernel(q, k, k.detach(), 0, place, NoCache(at.device), keep_nothing)
        return q, keys.transpose(1, 2)

    return KernelExample(rotate_and_cache, in_dtype(given), _with_gradients(turned, 2))


def _packed(name: str, config: ModelConfig, at: Target, size: Size) -> KernelExample:
    numbers, kind, n_in = Numbers(at), kind_named(name), -(-config.hidden_size // 256) * 256
    torch.manual_seed(0)
    plain = QuantisedLinear(random_fields((config.intermediate_size, n_in), kind, at.device), kind)
    return _example_with_one_result(plain, numbers(*size, n_in), numbers(*size, config.intermediate_size))


TRAINED_EXAMPLES: dict[str, Callable[[ModelConfig, Target, Size], KernelExample]] = {
    "norm": _norm, "rotate": _rotate, "act": _act,
    **{f"packed {name}": partial(_packed, name) for name in CPU_KIND_NAMES},
}  # fmt: skip


N_EXPERTS, TOP = 9, 4
LENGTHS = (1, 7, 80)  # of sequences; the first is that of decoding


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


def _conv(config: ModelConfig, at: Target) -> KernelExample:
    numbers, width = Numbers(at), config.q_width
    plain = ShortConv(width, 4)
    plain.weight = _frozen(numbers(width, 4))
    given = [(numbers(2, seq, width), numbers(2, 3, width), seq) for seq in LENGTHS]

    def inputs(dtype: torch.dtype) -> Sequence[tuple]:
        some = torch.arange(160, device=at.device).view(2, 80) % 3 > 0
        whole = [(x.to(dtype), before.to(dtype), None) for x, before, _ in given]
        return [*whole, *((x, before, some[:, :seq]) for (x, before, _), (*_, seq) in zip(whole, given, strict=True))]

    return KernelExample(plain, inputs, lambda kernel, x, before, real: _real_rows(kernel(x, before, real), real))


def _real_rows(made: tuple[Tensor, Tensor], real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Set rows at padding to zero, because their values mean nothing."""
    return made if real is None else (made[0] * real[..., None], made[1])


def _gated_norm(config: ModelConfig, at: Target) -> KernelExample:
    numbers, width = Numbers(at), config.head_dim
    plain = GatedNorm(width, config.rms_norm_eps)
    plain.weight = _frozen(1 + numbers(width) / 2)
    given = [(numbers(1, seq, config.n_heads, width), numbers(1, seq, config.n_heads, width)) for seq in LENGTHS]
    return KernelExample(plain, lambda dtype: [(widened(x.to(dtype)), z.to(dtype)) for x, z in given])


def _l2_norm(config: ModelConfig, at: Target) -> KernelExample:
    numbers, heads, width = Numbers(at), config.n_kv_heads, config.head_dim
    given = [numbers(2, seq, 3 * heads * width)[..., : heads * width].unflatten(-1, (heads, -1)) for seq in LENGTHS]
    return KernelExample(l2_norm, lambda dtype: [(widened(x.to(dtype)),) for x in given])


def _delta_rule(config: ModelConfig, at: Target) -> KernelExample:
    numbers, heads, keys, width = Numbers(at), config.n_heads, config.n_kv_heads, config.head_dim

    def one(seq: int) -> tuple[Tensor, ...]:
        q, k = (l2_norm(widened(numbers(2, seq, keys, width))) for _ in "qk")
        decay = -numbers(2, seq, heads).abs() * torch.where(numbers(2, seq, heads) > 1, 300, 1)
        beta, state = numbers(2, seq, heads).sigmoid(), numbers(2, heads, width, width)
        return q, k, numbers(2, seq, heads, width), beta, decay, state

    given = [one(seq) for seq in LENGTHS]

    def inputs(dtype: torch.dtype) -> Sequence[tuple]:
        wide = torch.promote_types(dtype, torch.float32)
        return [tuple(x.to(wide) for x in tensors) for tensors in given]

    return KernelExample(delta_rule, inputs, lambda kernel, *x: kernel(*x[:-1], x[-1].clone()))  # which ours changes


def _routed_example(config: ModelConfig, at: Target, plain: nn.Module, width: int) -> KernelExample:
    """Build an example of expert products: one input for each token, and one for each chosen expert."""
    numbers = Numbers(at)
    ids = {seq: numbers(1, seq, N_EXPERTS).argsort(-1)[..., :TOP] for seq in LENGTHS}
    given = [(numbers(1, seq, one, width), ids[seq]) for one in (1, TOP) for seq in LENGTHS]
    return KernelExample(plain, lambda dtype: [(x.to(dtype), chosen) for x, chosen in given])


def _experts(config: ModelConfig, at: Target) -> KernelExample:
    numbers, width, size = Numbers(at), config.hidden_size, config.intermediate_size // 8
    plain = ExpertLinear(1, 1, 1)
    plain.weight = _frozen(numbers(N_EXPERTS, size, width))
    return _routed_example(config, at, plain, width)


def _packed_experts(name: str, config: ModelConfig, at: Target) -> KernelExample:
    kind, width = kind_named(name), -(-config.hidden_size // 256) * 256
    torch.manual_seed(0)
    fields = random_fields((N_EXPERTS * (config.intermediate_size // 8), width), kind, at.device)
    return _routed_example(config, at, QuantisedExperts(fields, kind, N_EXPERTS), width)


EXAMPLES: dict[str, Callable[[ModelConfig, Target], KernelExample]] = {
    "conv": _conv, "gated norm": _gated_norm, "l2 norm": _l2_norm, "delta rule": _delta_rule, "experts": _experts,
    **{f"packed experts {name}": partial(_packed_experts, name) for name in KIND_NAMES},
}  # fmt: skip
