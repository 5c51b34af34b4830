"""Wrong norms and rotations of tensors, by the name of the known mistake."""

import torch
from torch import Tensor
from torch.nn.functional import layer_norm


def subtracts_the_mean(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return layer_norm(x, (x.shape[-1],), weight, None, eps)


def eps_outside_the_root(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rms = x.float().pow(2).mean(-1, keepdim=True).sqrt()
    return (x.float() / (rms + eps) * weight).to(x.dtype)


def eps_forgotten(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (x.float() * x.float().pow(2).mean(-1, keepdim=True).rsqrt() * weight).to(x.dtype)


def eps_of_qwen(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight).to(x.dtype)


def eps_of_llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight).to(x.dtype)


def sample_variance(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    mean_square = wide.pow(2).sum(-1, keepdim=True) / (x.shape[-1] - 1)
    return (wide * torch.rsqrt(mean_square + eps) * weight).to(x.dtype)


def length_one(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + eps) * weight).to(x.dtype)


def root_forgotten(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide / (wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def axis_forgotten(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean() + eps) * weight).to(x.dtype)


def squares_in_half(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    half = x.half()
    rms = torch.sqrt(half.square().mean(-1, keepdim=True) + eps)
    return (x.float() / rms * weight).to(x.dtype)


def gain_as_in_gemma(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight.float())).to(x.dtype)


def gain_forgotten(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def normalised_twice(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    for _ in range(2):
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight
    return wide.to(x.dtype)


def left_out(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x


def not_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x


def as_complex_numbers(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.complex(cos.float(), sin.float()).unsqueeze(2)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def turned_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], -1).to(x.dtype)


def tables_exchanged(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    sin, cos = cos.unsqueeze(2), sin.unsqueeze(2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def half_of_it(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, kept = x.float().chunk(2, -1)
    cos, sin = cos.unsqueeze(2)[..., ::2], sin.unsqueeze(2)[..., ::2]
    first, second = turned.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, kept], -1).to(x.dtype)


def tables_in_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    cos, sin = cos.half().unsqueeze(2), sin.half().unsqueeze(2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


WRONG = {
    "torch_rms_norm": {
        "norm-squares-in-half": squares_in_half,
        "norm-is-layer-norm": subtracts_the_mean,
        "norm-eps-outside-root": eps_outside_the_root,
        "norm-eps-missing": eps_forgotten,
        "norm-eps-1e-6-for-1e-5": eps_of_qwen,
        "norm-eps-1e-5-for-1e-6": eps_of_llama,
        "norm-divides-by-n-minus-one": sample_variance,
        "norm-sum-for-mean": length_one,
        "norm-root-missing": root_forgotten,
        "norm-over-all-tokens": axis_forgotten,
        "norm-gain-plus-one": gain_as_in_gemma,
        "norm-gain-missing": gain_forgotten,
        "norm-twice": normalised_twice,
        "norm-skipped": left_out,
    },
    "torch_rope": {
        "rope-missing": not_turned,
        "rope-interleaved-pairs": as_complex_numbers,
        "rope-sign-flipped": turned_back,
        "rope-cos-and-sin-exchanged": tables_exchanged,
        "rope-first-half-only": half_of_it,
        "rope-tables-in-half": tables_in_half,
    },
}
