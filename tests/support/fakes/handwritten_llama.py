"""Llama in torch as people write it: names of its own, no batch, a cache inside."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from llorch.files import Weights


class Turn(nn.Module):
    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        angles = positions[:, None, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        cos, sin = angles.cos().float(), angles.sin().float()
        a, b = x.split(half, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Norm(nn.Module):
    def __init__(self, gain: torch.Tensor) -> None:
        super().__init__()
        self.gain = nn.Parameter(gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.gain.shape, self.gain, 1e-5)


class Attn(nn.Module):
    def __init__(self, w: Any, head_dim: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (product(w[f"{part}_proj"]) for part in "qkvo")
        self.turn_q, self.turn_k, self.head_dim = Turn(), Turn(), head_dim
        self.past = [torch.empty(0), torch.empty(0)]

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        positions = torch.arange(start, start + len(x))
        q, k, v = (part(x).view(len(x), -1, self.head_dim) for part in (self.wq, self.wk, self.wv))
        new = (self.turn_k(k, positions), v)
        self.past = [torch.cat([old, now]) if start else now for old, now in zip(self.past, new, strict=True)]
        k, v = self.past
        mask = torch.arange(len(k)) <= positions[:, None]
        q, k, v = (y.transpose(0, 1)[None] for y in (self.turn_q(q, positions), k, v))
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.wo(y[0].transpose(0, 1).flatten(1))


class Block(nn.Module):
    def __init__(self, w: Any, head_dim: int) -> None:
        super().__init__()
        self.n1, self.n2, self.attn = Norm(tensor(w["attn_norm"])), Norm(tensor(w["ffn_norm"])), Attn(w, head_dim)
        self.gate, self.up, self.down = (product(w[f"{part}_proj"]) for part in ("gate", "up", "down"))

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        x = x + self.attn(self.n1(x), start)
        h = self.n2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Handwritten(nn.Module):
    def __init__(self, weights: Weights) -> None:
        super().__init__()
        config = weights.config
        self.tok = nn.Embedding.from_pretrained(tensor(weights["embed_tokens"]))
        self.blocks = nn.ModuleList(Block(weights.layer(i), config.head_dim) for i in range(config.n_layers))
        self.norm, self.head, self.n_seen = Norm(tensor(weights["final_norm"])), product(weights["lm_head"]), 0

    @torch.no_grad()
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, start = self.tok(ids), self.n_seen
        self.n_seen += len(ids)
        for block in self.blocks:
            x = block(x, start)
        return self.head(self.norm(x))


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.copy())


def product(matrix: np.ndarray) -> nn.Linear:
    linear = nn.Linear(*matrix.shape[::-1], bias=False)
    linear.weight = nn.Parameter(tensor(matrix))
    return linear
