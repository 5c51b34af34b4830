"""Wrong norms and rotations of tensors, by the name of the known mistake.

The page shows one of them, and llorch cannot make the rest. It makes all others from `llorch.diagnosis.mistakes`.
"""

import torch
from torch import Tensor


def squares_in_half(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    half = x.half()
    rms = torch.sqrt(half.square().mean(-1, keepdim=True) + eps)
    return (x.float() / rms * weight).to(x.dtype)


def half_of_it(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated, unrotated = x.float().chunk(2, -1)
    cos, sin = cos.unsqueeze(2)[..., ::2], sin.unsqueeze(2)[..., ::2]
    first, second = rotated.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, unrotated], -1).to(x.dtype)


WRONG = {
    "torch_rms_norm": {
        "norm-squares-in-half": squares_in_half,
    },
    "torch_rope": {
        "rope-first-half-only": half_of_it,
    },
}
