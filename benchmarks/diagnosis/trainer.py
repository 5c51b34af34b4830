"""Independent LoRA trainer: a small Llama on torch's autograd, and a hand-written optimizer.

Only the numbers of the files come through llorch. The trainer is right; `training_bugs` injects mistakes by replacing
one of its steps, which are methods, or a setting. Rows are padded at the end, or hold several documents; everything
computes in float32.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llorch.files import open_weights
from llorch.lora.adapter import Adapter
from llorch.runtime.builtin import builtin_path

SETTINGS = {
    "lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1, "max_grad_norm": 0.1, "label_smoothing": 0.05,
}  # fmt: skip
Named = dict[str, Tensor]


class Trainer:
    """Training run from an adapter; `replaced` are methods that replace its own, `settings` override `SETTINGS`."""

    def __init__(
        self, model: str, adapter: Adapter, replaced: Mapping[str, Callable[..., Any]], settings: Mapping[str, Any]
    ) -> None:
        """Load a built-in model."""
        weights = open_weights(builtin_path(model))
        self.c = weights.config
        self.w = {name: torch.tensor(weights[name]) for name in ("embed_tokens", "final_norm")}
        head = "embed_tokens" if self.c.tie_word_embeddings else "lm_head"
        self.w["lm_head"] = torch.tensor(weights[head])
        for layer in range(self.c.n_layers):
            self.w |= {f"layers.{layer}.{name}": torch.tensor(array) for name, array in weights.layer(layer).items()}
        config = adapter.config
        self.ranks = {name: config.rank_of(target) for name, target in adapter.targets.items()}
        self.alphas = {name: config.alpha_of(target) for name, target in adapter.targets.items()}
        self.rank, self.alpha, self.stabilised = config.r, config.lora_alpha, config.use_rslora
        self.p: Named = {name: torch.tensor(array) for name, array in adapter.flat().items()}
        self.m = {name: torch.zeros_like(p) for name, p in self.p.items()}
        self.v = {name: torch.zeros_like(p) for name, p in self.p.items()}
        self.s, self.t = SETTINGS | dict(settings), 0
        for name, method in replaced.items():
            setattr(self, name, method.__get__(self))

    def scale(self, name: str) -> float:
        """Compute the factor of an adapter's product."""
        return self.alphas[name] / (math.sqrt(self.ranks[name]) if self.stabilised else self.ranks[name])

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Apply a frozen matrix and add the output of its adapter."""
        return x @ self.w[name].T + self.detour(x, name)

    def detour(self, x: Tensor, name: str) -> Tensor:
        """Compute the output of the adapter."""
        return self.scale(name) * ((x @ self.p[f"{name}.lora_A"].T) @ self.p[f"{name}.lora_B"].T)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Apply RMSNorm."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.c.rms_norm_eps) * self.w[name]

    def angles(self) -> tuple[Tensor, Tensor]:
        """Compute cosines and sines, (rows, n, head_dim)."""
        half = torch.arange(0, self.c.head_dim, 2, dtype=torch.float64) / self.c.head_dim
        angles = self.positions[..., None].double() / self.c.rope_theta**half
        doubled = torch.cat([angles, angles], -1)
        return doubled.cos().float(), doubled.sin().float()

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate queries or keys, (rows, n, heads, head_dim)."""
        cos, sin = (table[:, :, None] for table in self.angles())
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def hidden(self) -> Tensor:
        """Compute the mask of the keys that a token must not see, (rows, n, n)."""
        n = self.documents.shape[1]
        return torch.ones(n, n).triu(1).bool() | (self.documents[:, :, None] != self.documents[:, None])

    def softmax(self, scores: Tensor) -> Tensor:
        """Apply the softmax over the keys."""
        return torch.softmax(scores, -1)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Compute the scaled scores of (rows, heads, n, head_dim)."""
        return q @ k.transpose(-1, -2) / math.sqrt(self.c.head_dim)

    def spread(self, x: Tensor) -> Tensor:
        """Repeat every key or value head for all query heads of its group."""
        return x.repeat_interleave(self.c.n_heads // self.c.n_kv_heads, 2)

    def attention(self, h: Tensor, i: int) -> Tensor:
        """Compute attention, the output matrix included."""
        rows, n, _ = h.shape
        q, k, v = (self.linear(h, f"layers.{i}.{kind}_proj").view(rows, n, -1, self.c.head_dim) for kind in "qkv")
        if self.c.qk_norm:
            q, k = self.norm(q, f"layers.{i}.q_norm"), self.norm(k, f"layers.{i}.k_norm")
        q, k, v = self.rotate(q), self.spread(self.rotate(k)), self.spread(v)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = self.scores(q, k).masked_fill(self.hidden()[:, None], -math.inf)
        mixed = (self.softmax(scores) @ v).transpose(1, 2).reshape(rows, n, -1)
        return self.linear(mixed, f"layers.{i}.o_proj")

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute the product of SwiGLU."""
        return gate * torch.sigmoid(gate) * up

    def block(self, x: Tensor, i: int) -> Tensor:
        """Compute one layer."""
        x = x + self.attention(self.norm(x, f"layers.{i}.attn_norm"), i)
        h = self.norm(x, f"layers.{i}.ffn_norm")
        act = self.gated(self.linear(h, f"layers.{i}.gate_proj"), self.linear(h, f"layers.{i}.up_proj"))
        return x + self.linear(act, f"layers.{i}.down_proj")

    def logits(self, ids: Tensor) -> Tensor:
        """Run the forward pass."""
        x = self.w["embed_tokens"][ids]
        for i in range(self.c.n_layers):
            x = self.block(x, i)
        return self.norm(x, "final_norm") @ self.w["lm_head"].T

    def targets(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Shift the labels: row i of the logits should predict label i + 1."""
        return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)

    def token_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss of every row of logits, 0 where the label is masked."""
        log_p = torch.log_softmax(logits, -1)
        target_loss, e = -log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0], self.s["label_smoothing"]
        return torch.where(targets == -100, 0.0, (1 - e) * target_loss - e * log_p.mean(-1))

    def loss(self, losses: Sequence[Tensor], targets: Sequence[Tensor], token_masks: Sequence[Tensor]) -> Tensor:
        """Compute the loss of a step from the losses of its micro-batches."""
        n_learned = sum(int((t != -100).sum()) for t in targets)
        return sum((x.sum() for x in losses), torch.zeros(())) / n_learned

    def gradients(self, loss: Tensor) -> Named:
        """Compute the gradients of all trained tensors, zero for tensors without a gradient."""
        gradients = torch.autograd.grad(loss, list(self.p.values()), allow_unused=True)
        return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(self.p.items(), gradients, strict=True)}

    def total_norm(self, grads: Named) -> Tensor:
        """Compute the norm of all gradients together."""
        return torch.sqrt(sum((g.pow(2).sum() for g in grads.values()), torch.zeros(())))

    def clip(self, grads: Named, norm: Tensor) -> Named:
        """Scale the gradients down to the largest norm."""
        factor = min(1.0, self.s["max_grad_norm"] / (float(norm) + 1e-6))
        return {name: grad * factor for name, grad in grads.items()}

    def moments(self, name: str, g: Tensor) -> None:
        """Update both running means."""
        b1, b2 = self.s["betas"]
        self.m[name] = b1 * self.m[name] + (1 - b1) * g
        self.v[name] = b2 * self.v[name] + (1 - b2) * g * g

    def update(self, name: str) -> Tensor:
        """Compute a tensor after decay and step."""
        (b1, b2), lr = self.s["betas"], self.s["lr"]
        m, v = self.m[name] / (1 - b1**self.t), self.v[name] / (1 - b2**self.t)
        return self.p[name] * (1 - lr * self.s["weight_decay"]) - lr * m / (v.sqrt() + self.s["eps"])

    def optimize(self, grads: Named) -> None:
        """Apply AdamW to all tensors."""
        for name, grad in grads.items():
            self.moments(name, grad)
            self.p[name] = self.update(name).detach()

    def step(self, micros: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Run one optimizer step; return everything that it shows, under the names of a dump."""
        self.t, arrays, outputs = self.t + 1, {}, []
        self.p = {name: p.detach().requires_grad_() for name, p in self.p.items()}
        for k, micro in enumerate(micros, 1):
            ids, labels = (torch.tensor(micro[name]) for name in ("input_ids", "labels"))
            self.documents = torch.tensor(documents_of(micro))
            self.positions = torch.tensor(micro.get("position_ids", np.indices(ids.shape)[1]))
            logits = self.logits(ids)
            targets = self.targets(ids, labels)
            is_token = torch.tensor(micro.get("attention_mask", np.ones(ids.shape))) != 0
            outputs.append((self.token_losses(logits, targets), targets, is_token))
            arrays |= {f"micro{k}.logits": logits, f"micro{k}.token_losses": outputs[-1][0]}
        loss = self.loss(*zip(*outputs, strict=True))
        grads = self.gradients(loss)
        norm = self.total_norm(grads)
        self.optimize({name: grad.detach() for name, grad in self.clip(grads, norm).items()})
        arrays |= {"loss": loss, "grad_norm": norm}
        for kind, tensors in {"grad": grads, "exp_avg": self.m, "exp_avg_sq": self.v, "param": self.p}.items():
            arrays |= {f"{kind}.{peft_name(name)}": array for name, array in tensors.items()}
        return {name: array.detach().numpy().copy() for name, array in arrays.items()}


def documents_of(micro: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the document of every token, (rows, n); a row without a declaration is one document."""
    ids, ends = micro["input_ids"], micro.get("cu_seqlens", np.zeros(0))
    numbers = np.searchsorted(ends, np.arange(ids.size), side="right").reshape(ids.shape)
    return micro.get("document_ids", numbers)


def peft_name(name: str) -> str:
    """Return the name that PEFT uses for a tensor."""
    path, _, kind = name.rpartition(".")
    block = "mlp" if any(part in path for part in ("gate", "up", "down")) else "self_attn"
    head, _, last = path.rpartition(".")
    return f"base_model.model.model.{head}.{block}.{last}.{kind}.weight"
