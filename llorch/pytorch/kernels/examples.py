"""Example inputs for checks of kernels with gradients, and of kernels of delta nets and experts; see `kernel_check`.

For a kernel with gradients (a trained kernel), the outputs to compare are the result of the forward pass and the
gradients of its inputs, for a random gradient of that result.
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
from llorch.pytorch.kernels.packing import CPU_KIND_NAMES
from llorch.pytorch.kernels.quantised_linear import QuantisedLinear
from llorch.pytorch.models.delta_net import GatedNorm, ShortConv, l2_norm
from llorch.pytorch.models.delta_rule import delta_rule
from llorch.pytorch.models.experts import ExpertLinear, QuantisedExperts
from llorch.pytorch.random_weights import kind_named, random_fields


@dataclass(frozen=True)
class KernelExample:
    """A torch module and inputs to call it with."""

    module: Any
    inputs: Callable[[torch.dtype], Sequence[tuple]]  # same numbers in any dtype; the first inputs are a decode step
    call: Callable[..., Tensor | tuple[Tensor, ...]] = lambda kernel, *arguments: kernel(*arguments)
    reference_dtype: torch.dtype = torch.float64  # in which the module computes the reference results


class Numbers:
    """Generator of random tensors in the dtype and on the device of a target."""

    def __init__(self, target: Target, *, seed: int = 0) -> None:
        """Seed the generator, so that every run draws the same numbers."""
        self.target, self.generator = target, torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        """Draw standard normal numbers."""
        return torch.randn(*shape, generator=self.generator).to(self.target.device, self.target.dtype)


Size = tuple[int, int]  # batch, sequence
Sizes = Sequence[tuple[int, ...]]  # of the rows of each call


def in_dtype(*inputs: tuple[Tensor, ...]) -> Callable[[torch.dtype], list[tuple]]:
    """Return a function that converts inputs to a dtype."""
    return lambda dtype: [tuple(tensor.to(dtype) for tensor in tensors) for tensors in inputs]


def _with_gradients(call: Callable[..., Sequence[Tensor]], n_results: int) -> Callable[..., tuple[Tensor, ...]]:
    """Extend a call by its backward pass; the last `n_results` arguments are gradients of its results."""

    @torch.enable_grad()
    def forward_backward(kernel: object, *arguments: Tensor) -> tuple[Tensor, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in arguments[:-n_results]]
        outputs = call(kernel, *inputs)
        grads = torch.autograd.grad(outputs, inputs, arguments[-n_results:])
        return *(tensor.detach() for tensor in outputs), *grads

    return forward_backward


def _trained(make: Callable[..., KernelExample], config: ModelConfig, target: Target, size: Size) -> KernelExample:
    """Extend the example of a kernel that returns one tensor by its backward pass."""
    example = make(config, target, (size,))
    (arguments,) = example.inputs(target.dtype)
    grad = Numbers(target, seed=1)(*example.module(*arguments).shape)
    call = _with_gradients(lambda kernel, *inputs: (kernel(*inputs),), 1)
    return KernelExample(example.module, in_dtype((*arguments, grad)), call)


def _norm(config: ModelConfig, target: Target, sizes: Sizes = ((1, 1), (5, 1))) -> KernelExample:
    numbers, width = Numbers(target), config.hidden_size
    module = RMSNorm(width, config.rms_norm_eps)
    module.weight = nn.Parameter(1 + numbers(width) / 2, requires_grad=False)
    return KernelExample(module, in_dtype(*((numbers(*size, width),) for size in sizes)))


def _act(config: ModelConfig, target: Target, sizes: Sizes = ((1, 1), (5, 1))) -> KernelExample:
    numbers, width = Numbers(target), config.intermediate_size
    return KernelExample(swiglu, in_dtype(*((4 * numbers(*size, width), numbers(*size, width)) for size in sizes)))


def _rotate(config: ModelConfig, target: Target, size: Size) -> KernelExample:
    numbers, half = Numbers(target), config.head_dim // 2
    heads = tuple(numbers(*size, n, config.head_dim) for n in (config.n_heads, config.n_kv_heads) * 2)
    positions = torch.arange(size[1], device=target.device).expand(size)
    angles = (positions[..., None] * torch.logspace(0, -4, half, device=target.device)).double()  # (batch, seq, half)

    def rotate_heads(kernel: Callable, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        cos, sin = (table.float().to(dtype) for table in (angles.cos(), angles.sin()))  # the same numbers in any dtype
        place = PassPlacement(positions, cos, sin, None, size[1])
        q, keys, _ = kernel(q, k, k.detach(), 0, place, NoCache(target.device), keep_nothing)
        return q, keys.transpose(1, 2)

    return KernelExample(rotate_and_cache, in_dtype(heads), _with_gradients(rotate_heads, 2))


def _packed(
    name: str, config: ModelConfig, target: Target, sizes: Sizes = ((1,), (2,), (8,), (40,), (300,))
) -> KernelExample:
    numbers, kind, n_in = Numbers(target), kind_named(name), -(-config.hidden_size // 256) * 256
    torch.manual_seed(0)
    module = QuantisedLinear(random_fields((config.intermediate_size, n_in), kind, target.device), kind)
    return KernelExample(module, in_dtype(*((numbers(*size, n_in),) for size in sizes)))


TRAINED_EXAMPLES: dict[str, Callable[[ModelConfig, Target, Size], KernelExample]] = {
    "norm": partial(_trained, _norm), "rotate": _rotate, "act": partial(_trained, _act),
    **{f"packed {name}": partial(_trained, partial(_packed, name)) for name in CPU_KIND_NAMES},
}  # fmt: skip


N_EXPERTS, TOP = 9, 4  # experts, and selected experts of a token
LENGTHS = (1, 7, 80)  # of sequences; the first is a decode step


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


def _conv(config: ModelConfig, target: Target) -> KernelExample:
    numbers, width = Numbers(target), config.q_width
    module = ShortConv(width, 4)
    module.weight = _frozen(numbers(width, 4))
    tensors = [(numbers(2, seq, width), numbers(2, 3, width), seq) for seq in LENGTHS]

    def inputs(dtype: torch.dtype) -> Sequence[tuple]:
        is_real = torch.arange(160, device=target.device).view(2, 80) % 3 > 0
        full = [(x.to(dtype), state.to(dtype), None) for x, state, _ in tensors]
        return [*full, *((x, state, is_real[:, :seq]) for (x, state, _), (*_, seq) in zip(full, tensors, strict=True))]

    return KernelExample(module, inputs, lambda kernel, x, state, real: _real_rows(kernel(x, state, real), real))


def _real_rows(outputs: tuple[Tensor, Tensor], real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Zero the rows of padding, whose values are arbitrary."""
    return outputs if real is None else (outputs[0] * real[..., None], outputs[1])


def _gated_norm(config: ModelConfig, target: Target) -> KernelExample:
    numbers, width = Numbers(target), config.head_dim
    module = GatedNorm(width, config.rms_norm_eps)
    module.weight = _frozen(1 + numbers(width) / 2)
    tensors = [(numbers(1, seq, config.n_heads, width), numbers(1, seq, config.n_heads, width)) for seq in LENGTHS]
    return KernelExample(module, lambda dtype: [(widened(x.to(dtype)), z.to(dtype)) for x, z in tensors])


def _l2_norm(config: ModelConfig, target: Target) -> KernelExample:
    numbers, heads, width = Numbers(target), config.n_kv_heads, config.head_dim
    tensors = [numbers(2, seq, 3 * heads * width)[..., : heads * width].unflatten(-1, (heads, -1)) for seq in LENGTHS]
    return KernelExample(l2_norm, lambda dtype: [(widened(x.to(dtype)),) for x in tensors])


def _delta_rule(config: ModelConfig, target: Target) -> KernelExample:
    numbers, heads, keys, width = Numbers(target), config.n_heads, config.n_kv_heads, config.head_dim

    def draw(seq: int) -> tuple[Tensor, ...]:
        q, k = (l2_norm(widened(numbers(2, seq, keys, width))) for _ in "qk")
        decay = -numbers(2, seq, heads).abs() * torch.where(numbers(2, seq, heads) > 1, 300, 1)  # some forget all
        beta, state = numbers(2, seq, heads).sigmoid(), numbers(2, heads, width, width)
        return q, k, numbers(2, seq, heads, width), beta, decay, state

    examples = [draw(seq) for seq in LENGTHS]

    def inputs(dtype: torch.dtype) -> Sequence[tuple]:
        dtype_wide = torch.promote_types(dtype, torch.float32)
        return [tuple(x.to(dtype_wide) for x in tensors) for tensors in examples]

    return KernelExample(delta_rule, inputs, lambda kernel, *x: kernel(*x[:-1], x[-1].clone()))  # kernels overwrite it


def _routed_example(config: ModelConfig, target: Target, module: nn.Module, width: int) -> KernelExample:
    """Make an example of expert products, with one input per token and with one per selected expert."""
    numbers = Numbers(target)
    ids = {seq: numbers(1, seq, N_EXPERTS).argsort(-1)[..., :TOP] for seq in LENGTHS}
    tensors = [(numbers(1, seq, inputs_per_token, width), ids[seq]) for inputs_per_token in (1, TOP) for seq in LENGTHS]
    return KernelExample(module, lambda dtype: [(x.to(dtype), expert_ids) for x, expert_ids in tensors])


def _experts(config: ModelConfig, target: Target) -> KernelExample:
    numbers, width, size = Numbers(target), config.hidden_size, config.intermediate_size // 8
    module = ExpertLinear(1, 1, 1)
    module.weight = _frozen(numbers(N_EXPERTS, size, width))
    return _routed_example(config, target, module, width)


def _packed_experts(name: str, config: ModelConfig, target: Target) -> KernelExample:
    kind, width = kind_named(name), -(-config.hidden_size // 256) * 256
    torch.manual_seed(0)
    fields = random_fields((N_EXPERTS * (config.intermediate_size // 8), width), kind, target.device)
    return _routed_example(config, target, QuantisedExperts(fields, kind, N_EXPERTS), width)


EXAMPLES: dict[str, Callable[[ModelConfig, Target], KernelExample]] = {
    "norm": _norm, "act": _act, **{f"packed {name}": partial(_packed, name) for name in CPU_KIND_NAMES}, "conv": _conv,
    "gated norm": _gated_norm, "l2 norm": _l2_norm, "delta rule": _delta_rule, "experts": _experts,
    **{f"packed experts {name}": partial(_packed_experts, name) for name in CPU_KIND_NAMES},
}  # fmt: skip
