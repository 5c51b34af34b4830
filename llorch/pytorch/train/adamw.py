"""AdamW on the parameters of an adapter: formula and order of `llorch.training.adamw`, its moments in 8 bits if wanted.

Operations and their order are torch's, and with 8 bits those of bitsandbytes, so that the bits are equal. If ranks
share parameters, each updates its own part; only the norm is taken of whole gradients. With 8 bits the update uses the
new moments before they are rounded, so all of it but three operations is needed here anyway.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llorch.pytorch.distributed.dtensor import like, own, part_of, whole_together
from llorch.pytorch.train.eight_bit import SIGNED, UNSIGNED, Codec, EightBit, zeros
from llorch.runtime.errors import UserError
from llorch.training.adamw import NonFiniteNorm, rate_factor

MIN_SIZE = 4096  # smaller tensors keep moments of their own type

foreach: Any = torch  # operations on lists of tensors, a few launches on a GPU; torch's own, with an underscore


class AdamW:
    """Moments of every trained tensor, and one count of steps for all of them."""

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        lr_ratio: float,
        eight_bit: bool,
    ) -> None:
        """Start with moments of zero; `params` are updated in place.

        `weight_decay` is the share of a tensor, times its rate, that each step takes away; `lr_ratio` the rate of B
        over that of A, as in LoRA+. With `eight_bit`, tensors of 4096 numbers and more have moments of 8 bits.
        """
        self.params = dict(params)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.step_count = 0
        values = {name: own(parameter.data) for name, parameter in self.params.items()}
        device = next(iter(values.values())).device
        self.codecs = Codec(SIGNED, device), Codec(UNSIGNED, device)
        self._factors = {name: rate_factor(name, lr_ratio=lr_ratio) for name in params}
        small = {name: value for name, value in values.items() if not eight_bit or value.numel() < MIN_SIZE}
        self._full = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in small.items()}
        self._packed = {name: (zeros(value), zeros(value)) for name, value in values.items() if name not in small}

    @torch.no_grad()
    def clip(self, max_norm: float) -> float:
        """Scale all gradients together to a norm of at most `max_norm`, which may be inf; gives the norm before."""
        grads = self._grads()
        complete = whole_together(grads)
        norm = torch.nn.utils.get_total_norm(complete.values())
        if not norm.isfinite():
            names = [name for name, grad in complete.items() if not grad.isfinite().all()]
            raise NonFiniteNorm(norm.item(), names)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grad_norm_ has it
        foreach._foreach_mul_([own(grad) for grad in grads.values()], factor)
        return norm.item()

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every parameter from its gradient, at a rate before the factor of LoRA+."""
        grads = {name: own(grad) for name, grad in self._grads().items()}
        self.step_count += 1
        if self._full:
            m, v = map(list, zip(*self._full.values(), strict=True))
            self._step(list(self._full), [grads[name] for name in self._full], m, v, lr)
        for name, (m, v) in self._packed.items():
            self._step_packed(name, grads[name], m, v, lr)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.params.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return all that the next step depends on, besides the parameters: not copied, so the next step changes it.

        `step`, and moments as `layers.3.q_proj.lora_A.m` and `.v`, parts as their parameter is one; with 8 bits these
        are codes, beside `.m_absmax` and `.v_absmax`.
        """
        return {"step": torch.tensor(self.step_count)} | self._tensors()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a copy of what `state` gave, whole; other names, shapes or dtypes are refused."""
        mine = self.state()
        wrong = [
            f"{name} expected {_kind(mine.get(name))}, got {_kind(state.get(name))}"
            for name in sorted(mine.keys() | state.keys())
            if _kind(mine.get(name)) != _kind(state.get(name))
        ]
        if wrong:
            raise UserError(
                f"optimizer state: {len(wrong)} of {len(mine)} tensors differ: {'; '.join(wrong[:5])}; "
                "use the adapter and the settings of the saved run"
            )
        self.step_count = int(state["step"])
        for name, tensor in self._tensors().items():
            own(tensor).copy_(part_of(state[name], tensor))

    def _step(self, names: list[str], grads: list[Tensor], m: list[Tensor], v: list[Tensor], lr: float) -> None:
        foreach._foreach_lerp_(m, grads, 1 - self.betas[0])
        foreach._foreach_mul_(v, self.betas[1])
        foreach._foreach_addcmul_(v, grads, grads, 1 - self.betas[1])
        self._move(names, m, v, lr)

    def _step_packed(self, name: str, grad: Tensor, m: EightBit, v: EightBit, lr: float) -> None:
        first, second = (codec.decode(x).to(grad.dtype) for codec, x in zip(self.codecs, (m, v), strict=True))
        first.mul_(self.betas[0]).add_(grad, alpha=1 - self.betas[0])
        second.mul_(self.betas[1]).addcmul_(grad, grad, value=1 - self.betas[1])
        self._move([name], [first], [second], lr)
        self.codecs[0].encode(first, m)
        self.codecs[1].encode(second, v)

    def _move(self, names: Sequence[str], m: list[Tensor], v: list[Tensor], lr: float) -> None:
        """Decay and update parameters, given their new moments."""
        params, rates = [own(self.params[name].data) for name in names], [lr * self._factors[name] for name in names]
        correction_m, correction_v = (1 - beta**self.step_count for beta in self.betas)
        foreach._foreach_mul_(params, [1 - rate * self.weight_decay for rate in rates])
        root = foreach._foreach_sqrt(v)
        foreach._foreach_div_(root, correction_v**0.5)
        foreach._foreach_add_(root, self.eps)
        foreach._foreach_addcdiv_(params, m, root, [-(rate / correction_m) for rate in rates])

    def _tensors(self) -> dict[str, Tensor]:
        found = {
            f"{name}.{kind}": like(self.params[name].data, moment)
            for name, pair in self._full.items()
            for kind, moment in zip("mv", pair, strict=True)
        }
        for name, pair in self._packed.items():
            for kind, x in zip("mv", pair, strict=True):
                found |= {f"{name}.{kind}": x.codes, f"{name}.{kind}_absmax": x.absmax}
        return found

    def _grads(self) -> dict[str, Tensor]:
        grads = {name: parameter.grad for name, parameter in self.params.items() if parameter.grad is not None}
        missing = [name for name in self.params if name not in grads]
        if missing:
            raise UserError(
                f"optimizer: {len(missing)} of {len(self.params)} parameters have no gradient, so the loss does not "
                f"depend on them: {', '.join(missing[:5])}"
            )
        return grads


def _kind(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
