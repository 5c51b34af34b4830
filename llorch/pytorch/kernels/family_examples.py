"""Examples with which kernels of delta nets and experts are tried, see `llorch.pytorch.kernels.kernel_check`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from llorch.families.config import ModelConfig
from llorch.pytorch.causal_lm import widened
from llorch.pytorch.device import Target
from llorch.pytorch.kernels.example import KernelExample, Numbers
from llorch.pytorch.kernels.packing import Kind
from llorch.pytorch.models.delta_net import GatedNorm, ShortConv, l2_norm
from llorch.pytorch.models.delta_rule import delta_rule
from llorch.pytorch.models.experts import ExpertLinear, QuantisedExperts
from llorch.pytorch.random_weights import kind_named, random_fields

N_EXPERTS, TOP = 9, 4
LENGTHS = (1, 7, 80)  # of sequences; the first is that of decoding
PACKED_EXPERTS = "packed experts "


def example_of(kind: str, config: ModelConfig, at: Target) -> KernelExample:
    """Make the examples of a kind of kernel, at the shapes of a model."""
    if kind.startswith(PACKED_EXPERTS):
        return _packed_experts(config, at, kind_named(kind.removeprefix(PACKED_EXPERTS)))
    return EXAMPLES[kind](config, at)


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

    return KernelExample(
        delta_rule, inputs, lambda kernel, *x: kernel(*x[:-1], x[-1].clone())
    )  # ours writes the state there


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


def _packed_experts(config: ModelConfig, at: Target, kind: Kind) -> KernelExample:
    width = -(-config.hidden_size // 256) * 256
    torch.manual_seed(0)
    fields = random_fields((N_EXPERTS * (config.intermediate_size // 8), width), kind, at.device)
    return _routed_example(config, at, QuantisedExperts(fields, kind, N_EXPERTS), width)


EXAMPLES: dict[str, Callable[[ModelConfig, Target], KernelExample]] = {
    "conv": _conv, "gated norm": _gated_norm, "l2 norm": _l2_norm, "delta rule": _delta_rule, "experts": _experts,
}  # fmt: skip
