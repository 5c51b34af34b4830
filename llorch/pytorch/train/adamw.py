"""AdamW on the parameters of an adapter: formula and order of `llorch.training.adamw`, with optional 8-bit moments.

Operations and their order are torch's, or those of bitsandbytes with 8 bits, so that the bits are equal. If parameters
are sharded over ranks, each rank updates its part; only the norm needs complete gradients. With 8 bits the update uses
the new moments before they are rounded, so it shares all but three operations with the full update.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llorch.pytorch.distributed.dtensor import gather_all, like, own, part_of
from llorch.pytorch.train.eight_bit import SIGNED, UNSIGNED, Codec, EightBit, zeros
from llorch.runtime.errors import UserError
from llorch.training.adamw import NonFiniteNorm, rate_factor

MIN_SIZE = 4096  # smaller tensors have moments in their own dtype

foreach: Any = torch  # private operations of torch on lists of tensors, with few launches on a GPU


class AdamW:
    """Optimizer AdamW: moments of every trained tensor, and one step count for all."""

    def __init__(
        self, params: Mapping[str, nn.Parameter], *, betas: tuple[float, float], eps: float, weight_decay: float,
        lr_ratio: float, eight_bit: bool,
    ) -> None:  # fmt: skip
        """Start with moments of zero; `params` are updated in place.

        Each step decays a tensor by `weight_decay` times its learning rate; `lr_ratio` is the rate of lora_B over that
        of lora_A (LoRA+). With `eight_bit`, tensors of at least `MIN_SIZE` numbers have moments of 8 bits.
        """
        self.params = dict(params)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.step_count = 0
        tensors = {name: own(parameter.data) for name, parameter in self.params.items()}
        device = next(iter(tensors.values())).device
        self.codecs = Codec(SIGNED, device), Codec(UNSIGNED, device)
        self._factors = {name: rate_factor(name, lr_ratio=lr_ratio) for name in params}
        small = {name: tensor for name, tensor in tensors.items() if not eight_bit or tensor.numel() < MIN_SIZE}
        self._full = {name: (torch.zeros_like(tensor), torch.zeros_like(tensor)) for name, tensor in small.items()}
        self._packed = {name: (zeros(tensor), zeros(tensor)) for name, tensor in tensors.items() if name not in small}

    @torch.no_grad()
    def clip(self, max_norm: float) -> float:
        """Clip all gradients to a common norm of at most `max_norm` (may be inf); return the norm before.

        Raises NonFiniteNorm, before any change, if a gradient is not finite.
        """
        grads = self._grads()
        complete = gather_all(grads)
        norm = torch.nn.utils.get_total_norm(complete.values())
        if not norm.isfinite():
            names = [name for name, grad in complete.items() if not grad.isfinite().all()]
            raise NonFiniteNorm(norm.item(), names)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as in torch.nn.utils.clip_grad_norm_
        foreach._foreach_mul_([own(grad) for grad in grads.values()], factor)
        return norm.item()

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every parameter from its gradient; `lr` is the learning rate without the factor of LoRA+."""
        grads = {name: own(grad) for name, grad in self._grads().items()}
        self.step_count += 1
        if self._full:
            m, v = map(list, zip(*self._full.values(), strict=True))
            self._step(list(self._full), [grads[name] for name in self._full], m, v, lr)
        for name, (m, v) in self._packed.items():
            self._step_packed(name, grads[name], m, v, lr)

    def zero_grad(self) -> None:
        """Delete all gradients."""
        for parameter in self.params.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return the state of the next step without the parameters: not copied, so the next step changes it.

        `step`, and moments as `layers.3.q_proj.lora_A.m` and `.v`, sharded like their parameter; 8-bit moments are
        codes plus `.m_absmax` and `.v_absmax`.
        """
        return {"step": torch.tensor(self.step_count)} | self._tensors()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy a saved `state` whose tensors are complete, not sharded; refuse other names, shapes or dtypes."""
        current = self.state()
        differences = [
            f"{name} expected {_kind(current.get(name))}, got {_kind(state.get(name))}"
            for name in sorted(current.keys() | state.keys())
            if _kind(current.get(name)) != _kind(state.get(name))
        ]
        if differences:
            raise UserError(
                f"optimizer state: {len(differences)} of {len(current)} tensors differ: {'; '.join(differences[:5])}; "
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
        tensors = {
            f"{name}.{kind}": like(self.params[name].data, moment)
            for name, pair in self._full.items()
            for kind, moment in zip("mv", pair, strict=True)
        }
        for name, pair in self._packed.items():
            for kind, x in zip("mv", pair, strict=True):
                tensors |= {f"{name}.{kind}": x.codes, f"{name}.{kind}_absmax": x.absmax}
        return tensors

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
