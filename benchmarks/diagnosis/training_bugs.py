"""Bugs of the trainer: replacements of its methods or settings, and the correct diagnosis of each."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.diagnosis.trainer import Trainer


@dataclass(frozen=True)
class Bug:
    """Bug of the trainer.

    Attributes:
        name: Name of the bug.
        stage: Group of the table of training stages where it shows first.
        replaced: Methods of the trainer, or settings, that it changes.
        names: Known mistakes that are a right name; empty: no known mistake.
        value: Value that is to be recovered.
        settings: Settings of the run except for the bug, as the dump declares them.
        rows: Rows of the batches: see `training_cases.micro_batch`.
    """

    name: str
    stage: str
    replaced: Mapping[str, Any]
    names: Sequence[str] = ()
    value: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    rows: str = "ragged"


class Through(torch.autograd.Function):
    """Function with its own backward pass: `apply(result, back, x)`."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, back: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:  # noqa: D102
        ctx.back = back
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:  # noqa: D102
        return None, None, ctx.back(grads[0])


def through(result: Tensor, x: Tensor, back: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `result`, but send its gradient back to `x` through `back`."""
    return Through.apply(result.detach(), back, x)  # type: ignore[return-value]


def re_read(array: Tensor) -> Tensor:
    """Read a file of the transpose as if it held the matrix."""
    return array.reshape(array.shape[1], array.shape[0]).T


def detour(
    of: Callable[[Trainer, str], float], a: Any = None, b: Any = None, cut: bool = False
) -> Callable[..., Tensor]:
    """Make an adapter with another scale or other matrices, or one that sends no gradient back to its input."""

    def wrong(self: Trainer, x: Tensor, name: str) -> Tensor:
        A, B = self.p[f"{name}.lora_A"], self.p[f"{name}.lora_B"]
        down = (x.detach() if cut else x) @ (a(A) if a else A).T
        return of(self, name) * (down @ (b(B) if b else B).T)

    return wrong


def rotated_again(self: Trainer, x: Tensor) -> Tensor:
    """Rotate the gradient the same way once more in the backward pass."""
    right, positions = Trainer.rotate(self, x), self.positions

    def back(grad: Tensor) -> Tensor:
        self.positions = positions  # of this micro-batch: the backward pass follows all forward passes
        return Trainer.rotate(self, grad)

    return through(right, x, back)


def softmax_of(back: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Make a softmax with another derivative."""

    def wrong(self: Trainer, scores: Tensor) -> Tensor:
        probs = torch.softmax(scores, -1)
        return through(probs, scores, lambda grad: back(grad, probs.detach()))

    return wrong


def plain_scores(self: Trainer, q: Tensor, k: Tensor) -> Tensor:
    """Scale the scores in the forward pass only."""
    product = q @ k.transpose(-1, -2)
    return through(product / math.sqrt(self.c.head_dim), product, lambda grad: grad)


def one_of_group(self: Trainer, x: Tensor) -> Tensor:
    """Send a gradient back from the first query head of each group only."""
    repeated, group = Trainer.spread(self, x), self.c.n_heads // self.c.n_kv_heads
    first = (torch.arange(repeated.shape[2]) % group == 0)[:, None]
    return torch.where(first, repeated, repeated.detach())


def loss_by(count: Callable[[Sequence[Tensor], Sequence[Tensor]], float]) -> Callable[..., Tensor]:
    """Divide the sum of the losses by another count."""

    def wrong(self: Trainer, losses: Any, targets: Any, token_masks: Any) -> Tensor:
        return sum((x.sum() for x in losses), torch.zeros(())) / count(targets, token_masks)

    return wrong


def means(of_rows: bool, total: bool = False) -> Callable[..., Tensor]:
    """Average or add up the means of rows or of micro-batches."""

    def wrong(self: Trainer, losses: Any, targets: Any, token_masks: Any) -> Tensor:
        dims = 1 if of_rows else (0, 1)
        parts = [x.sum(dims) / (t != -100).sum(dims) for x, t in zip(losses, targets, strict=True)]
        means_of_parts = torch.cat([part.reshape(-1) for part in parts])
        return means_of_parts.sum() if total else means_of_parts.mean()

    return wrong


def smoothed(self: Trainer, logits: Tensor, targets: Tensor) -> Tensor:
    """Add the uniform part of label smoothing to the whole token loss, instead of to (1 - e) of it."""
    log_p, e = torch.log_softmax(logits, -1), self.s["label_smoothing"]
    target_loss = -log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return torch.where(targets == -100, 0.0, target_loss - e * log_p.mean(-1))


def moments_by(m: Callable[..., Tensor], v: Callable[..., Tensor]) -> Callable[..., None]:
    """Replace the running means by others."""

    def wrong(self: Trainer, name: str, g: Tensor) -> None:
        b1, b2 = self.s["betas"]
        self.m[name], self.v[name] = m(self, name, g, b1), v(self, name, g, b2)

    return wrong


def mean_of(kind: str, square: bool = False) -> Callable[..., Tensor]:
    """Make the correct update of a running mean."""
    return lambda self, name, g, b: b * getattr(self, kind)[name] + (1 - b) * (g * g if square else g)


def update(  # noqa: D103
    root: Callable[[Tensor, float], Tensor] = lambda v, eps: v.sqrt() + eps, decay: str = "before",
    correct: Callable[[int], float] = float, sign: bool = False, eps: float | None = None,
) -> Callable[..., Tensor]:  # fmt: skip
    def wrong(self: Trainer, name: str) -> Tensor:
        (b1, b2), lr, t = self.s["betas"], self.s["lr"], correct(self.t)
        m, v = self.m[name] / (1 - b1**t), self.v[name] / (1 - b2**t)
        step = m.sign() if sign else m / root(v, self.s["eps"] if eps is None else eps)
        decayed = 1 - lr * self.s["weight_decay"]
        factors = {"before": decayed, "whole": 1 - self.s["weight_decay"], "none": 1.0, "after": 1.0}
        updated = self.p[name] * factors[decay] - lr * step
        return updated * decayed if decay == "after" else updated

    return wrong


def coupled(self: Trainer, grads: dict[str, Tensor]) -> None:
    """Replace AdamW by Adam with L2 decay."""
    decay, self.s["weight_decay"] = self.s["weight_decay"], 0.0
    Trainer.optimize(self, {name: grad + decay * self.p[name].detach() for name, grad in grads.items()})
    self.s["weight_decay"] = decay


def hooked(factor: float, name: str) -> Callable[..., dict[str, Tensor]]:
    """Multiply one gradient by a factor."""

    def wrong(self: Trainer, loss: Tensor) -> dict[str, Tensor]:
        grads = Trainer.gradients(self, loss)
        return grads | {name: grads[name] * factor}

    return wrong


def frozen(name: str) -> Callable[..., dict[str, Tensor]]:
    """Train no tensor of the adapters of one kind of matrix."""

    def wrong(self: Trainer, loss: Tensor) -> dict[str, Tensor]:
        return {n: g * (name not in n) for n, g in Trainer.gradients(self, loss).items()}

    return wrong


def all_visible(self: Trainer) -> Tensor:
    """Mask later tokens only, not the other documents of a row."""
    return torch.ones_like(Trainer.hidden(self)).triu(1)


def dropped(self: Trainer, x: Tensor, name: str) -> Tensor:
    """Leave dropout on."""
    return Trainer.detour(self, torch.nn.functional.dropout(x, 0.1), name)


def bits(self: Trainer, logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the token losses to the base of two."""
    return Trainer.token_losses(self, logits, targets) / math.log(2)


def fast_b(self: Trainer, name: str) -> Tensor:
    """Let B learn four times as fast."""
    lr = self.s["lr"]
    self.s["lr"] = lr * (4 if name.endswith("B") else 1)
    updated = Trainer.update(self, name)
    self.s["lr"] = lr
    return updated


SETTING = "settings"
BUGS: tuple[Bug, ...] = (
    Bug("scale-is-alpha", "adapted_logits", {"scale": lambda s, n: s.alphas[n]}, ("lora-alpha-not-divided",)),
    Bug("scale-is-alpha-by-root", "adapted_logits", {"scale": lambda s, n: s.alphas[n] / math.sqrt(s.ranks[n])},
        ("lora-rslora-not-asked-for",)),
    Bug("scale-squared", "adapted_logits", {"scale": lambda s, n: Trainer.scale(s, n) ** 2}, ("lora-scaled-twice",)),
    Bug("scale-missing", "adapted_logits", {"scale": lambda s, n: 1.0}, ("lora-not-scaled",)),
    Bug("scale-doubled", "adapted_logits", {"scale": lambda s, n: 2 * Trainer.scale(s, n)}, ("lora-scaling",)),
    Bug("rank-pattern", "adapted_logits", {"scale": lambda s, n: s.alphas[n] / s.rank}, ("lora-rank-pattern-ignored",)),
    Bug("alpha-pattern", "adapted_logits", {"scale": lambda s, n: s.alpha / s.ranks[n]},
        ("lora-alpha-pattern-ignored",)),
    Bug("adapter-off", "adapted_logits", {"detour": detour(lambda s, n: 0.0)}, ("lora-delta-missing",)),
    *(Bug(f"adapter-off-{part}", "adapted_logits", {
        "detour": detour(lambda s, n, part=part: Trainer.scale(s, n) * (part not in n))}, ("lora-partly-applied",))
      for part in ("v_proj", "down_proj", "layers.1")),
    Bug("adapter-off-attention", "adapted_logits", {
        "detour": detour(lambda s, n: Trainer.scale(s, n) * n.endswith(("gate_proj", "up_proj", "down_proj")))},
        ("lora-partly-applied",)),
    *(Bug(f"documents-visible-{rows}", "adapted_logits", {"hidden": all_visible}, ("packed-documents-see-each-other",),
          rows=rows)
      for rows in ("restarting", "running")),
    Bug("v-frozen", "gradient", {"gradients": frozen("v_proj")}, ("gradient-exactly-zero",)),
    Bug("all-frozen", "gradient", {"gradients": frozen("")}, ("gradient-exactly-zero",)),
    Bug("a-transposed", "adapted_logits", {"detour": detour(Trainer.scale, a=re_read)}, ("lora-a-transposed",)),
    Bug("b-transposed", "adapted_logits", {"detour": detour(Trainer.scale, b=re_read)}, ("lora-b-transposed",)),
    Bug("not-shifted", "token_losses", {"targets": lambda s, ids, labels: labels}, ("loss-labels-not-shifted",)),
    Bug("shifted-twice", "token_losses", {
        "targets": lambda s, i, labels: Trainer.targets(s, i, Trainer.targets(s, i, labels))},
        ("loss-labels-shifted-twice",)),
    Bug("prompt-learned", "loss", {"targets": lambda s, ids, labels: Trainer.targets(
        s, ids, torch.where(ids == 0, -100, ids))}, ("loss-prompt-not-masked",)),
    Bug("smoothing-off", "token_losses", {SETTING: {"label_smoothing": 0.0}}, ("loss-smoothing-missing",)),
    Bug("smoothing-0.2", "token_losses", {SETTING: {"label_smoothing": 0.2}}, ("label-smoothing",), 0.2),
    Bug("smoothing-added", "token_losses", {"token_losses": smoothed}, ("loss-smoothing-added",)),
    Bug("in-bits", "token_losses", {"token_losses": bits}, ("loss-in-bits",)),
    Bug("by-all-slots", "loss", {"loss": loss_by(lambda t, masks: sum(target.numel() for target in t))},
        ("loss-divided-by-slots",)),
    Bug("by-rows", "loss", {"loss": loss_by(lambda t, masks: sum(len(rows) for rows in t))}, ("loss-divided-by-rows",)),
    Bug("summed", "loss", {"loss": loss_by(lambda t, masks: 1)}, ("loss-summed",)),
    Bug("by-all-tokens", "loss", {"loss": loss_by(lambda t, masks: sum(int(mask.sum()) for mask in masks))},
        ("loss-divided-by-all-tokens",)),
    Bug("eight-times", "loss", {"loss": lambda s, *parts: 8 * Trainer.loss(s, *parts)}, ("loss-normalisation",), 8),
    Bug("mean-of-rows", "loss", {"loss": means(of_rows=True)}, ("loss-mean-of-rows",)),
    Bug("mean-of-means", "loss", {"loss": means(of_rows=False)}, ("accumulation-mean-of-means",)),
    Bug("means-added", "loss", {"loss": means(of_rows=False, total=True)}, ("accumulation-not-divided",)),
    Bug("last-micro-batch", "loss", {"loss": lambda s, *parts: Trainer.loss(s, *(part[-1:] for part in parts))},
        ("accumulation-last-batch-only",)),
    Bug("norm-detached", "gradient", {"norm": lambda s, x, n: x * torch.rsqrt(
        x.detach().pow(2).mean(-1, keepdim=True) + s.c.rms_norm_eps) * s.w[n]}, ("gradient-norm-second-term-missing",)),
    Bug("silu-detached", "gradient", {"gated": lambda s, g, u: g * torch.sigmoid(g).detach() * u},
        ("gradient-silu-second-term-missing",)),
    Bug("blocks-cut", "gradient", {"block": lambda s, x, i: Trainer.block(s, x.detach(), i)},
        ("gradient-graph-cut-between-blocks",)),
    Bug("detour-cut", "gradient", {"detour": detour(Trainer.scale, cut=True)}, ("gradient-lora-input-left-out",)),
    Bug("frozen-cut", "gradient", {"linear": lambda s, x, n: x.detach() @ s.w[n].T + s.detour(x, n)},
        ("gradient-frozen-weight-stops-it",)),
    Bug("softmax-diagonal", "gradient", {"softmax": softmax_of(lambda g, p: g * p)},
        ("gradient-softmax-term-missing",)),
    Bug("softmax-sigmoid", "gradient", {"softmax": softmax_of(lambda g, p: g * p * (1 - p))},
        ("gradient-softmax-as-sigmoid",)),
    Bug("rotated-again", "gradient", {"rotate": rotated_again}, ("gradient-rope-turned-on",)),
    Bug("scores-back", "gradient", {"scores": plain_scores}, ("gradient-scores-not-scaled",)),
    Bug("scaler-left-on", "gradient", {"gradients": lambda s, loss: {
        n: g * 1024 for n, g in Trainer.gradients(s, loss).items()}}, ("gradient-scale",), 1024),
    Bug("unclipped", "first_moment", {SETTING: {"max_grad_norm": math.inf}}, ("clip-ignored",)),
    Bug("clip-each", "first_moment", {"clip": lambda s, grads, norm: {
        n: g * min(1.0, s.s["max_grad_norm"] / (float(g.norm()) + 1e-6)) for n, g in grads.items()}},
        ("clip-per-tensor",)),
    Bug("clip-values", "first_moment", {"clip": lambda s, grads, norm: {
        n: g.clamp(-s.s["max_grad_norm"], s.s["max_grad_norm"]) for n, g in grads.items()}}, ("clip-by-value",),
        settings={"max_grad_norm": 0.02}),
    Bug("norms-added", "grad_norm", {"total_norm": lambda s, grads: sum(g.norm() for g in grads.values())},
        ("clip-norm-of-tensors-added",)),
    Bug("max-norm-0.5", "first_moment", {SETTING: {"max_grad_norm": 0.05}}, ("max-grad-norm",), 0.05),
    Bug("betas-swapped", "first_moment", {SETTING: {"betas": (0.95, 0.9)}}, ("adamw-betas-swapped",)),
    Bug("beta2-0.99", "second_moment", {SETTING: {"betas": (0.9, 0.99)}}, ("adamw-beta2",), 0.99),
    Bug("momentum", "first_moment", {"moments": moments_by(lambda s, n, g, b: b * s.m[n] + g, mean_of("v", True))},
        ("adamw-moment-not-weighted",)),
    Bug("coupled-decay", "first_moment", {"optimize": coupled}, ("adamw-decay-in-gradient",)),
    Bug("uncorrected", "parameters", {"update": update(correct=lambda t: 1e9)}, ("adamw-no-bias-correction",)),
    Bug("step-late", "parameters", {"update": update(correct=lambda t: max(1, t - 1))}, ("adamw-step-counted-late",)),
    Bug("no-decay", "parameters", {"update": update(decay="none")}, ("adamw-decay-missing",)),
    Bug("whole-decay", "parameters", {"update": update(decay="whole")}, ("adamw-decay-not-times-rate",)),
    Bug("eps-inside", "parameters", {"update": update(lambda v, eps: (v + eps).sqrt())}, ("adamw-eps-inside-root",)),
    Bug("no-root", "parameters", {"update": update(lambda v, eps: v + eps)}, ("adamw-root-missing",)),
    Bug("eps-1e-4", "parameters", {SETTING: {"eps": 1e-4}}, ("adamw-eps",), 1e-4),
    Bug("decay-0.01", "parameters", {SETTING: {"weight_decay": 0.03}}, ("adamw-weight-decay",), 0.03),
    Bug("lr-halved", "parameters", {SETTING: {"lr": 1e-3}}, ("learning-rate",), 1e-3),
    Bug("one-gradient-doubled", "gradient", {"gradients": hooked(2.0, "layers.1.v_proj.lora_A")}),
    Bug("heads-not-summed", "gradient", {"spread": one_of_group},
        ("gradient-keys-not-summed-over-group", "gradient-values-not-summed-over-group")),
    Bug("base-norm-eps", "adapted_logits", {"norm": lambda s, x, n: x * torch.rsqrt(
        x.pow(2).mean(-1, keepdim=True) + 1e-2) * s.w[n]}),
    Bug("dropout-left-on", "adapted_logits", {"detour": dropped}),
    Bug("sign-of-momentum", "parameters", {"update": update(sign=True)}),
    Bug("b-learns-faster", "parameters", {"update": fast_b}),
    Bug("second-moment-of-size", "second_moment", {"moments": moments_by(
        mean_of("m"), lambda s, n, g, b: b * s.v[n] + (1 - b) * g.abs())}),
)  # fmt: skip
