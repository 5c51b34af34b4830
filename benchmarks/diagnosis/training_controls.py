"""Control dumps of training by unmodified PEFT, transformers and torch's AdamW: their differences are no bugs."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.diagnosis.trainer import SETTINGS, documents_of
from llorch.lora.adapter import Adapter
from llorch.runtime.builtin import builtin_path
from reference_outputs.peft_reference import Peft

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {}, "foreach": {"foreach": True}, "fused": {"fused": True}, "checkpointing": {"checkpointing": True},
    "bfloat16": {"dtype": "bfloat16"}, "bfloat16-not-said": {"dtype": "bfloat16"}, "clipped-gradients": {},
    "packed": {},
}  # fmt: skip


def peft_steps(
    model: str, adapter: Adapter, micros: list[list[dict[str, np.ndarray]]], variant: str
) -> dict[str, np.ndarray]:
    """Run some steps of PEFT on micro-batches; return the arrays of each step under the names of a dump."""
    options = dict(VARIANTS[variant])
    dtype, checkpointing = options.pop("dtype", "float32"), options.pop("checkpointing", False)
    net = Peft(builtin_path(model), dtype=dtype).adapted(adapter)
    if checkpointing:
        net.enable_input_require_grads()
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trainable = {name: p for name, p in net.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        trainable.values(), lr=SETTINGS["lr"], betas=SETTINGS["betas"], eps=SETTINGS["eps"],
        weight_decay=SETTINGS["weight_decay"], **options,
    )  # fmt: skip
    step_arrays: dict[str, Any] = {}
    for step, batches in enumerate(micros, 1):
        n_learned = sum(int((micro["labels"][:, 1:] != -100).sum()) for micro in batches)
        optimizer.zero_grad()
        total = 0.0
        for k, micro in enumerate(batches, 1):
            tensors = {name: torch.tensor(array) for name, array in micro.items()}
            mask = tensors["attention_mask"] if "attention_mask" in tensors else block_mask(documents_of(micro))
            logits = net(input_ids=tensors["input_ids"], attention_mask=mask).logits
            losses = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), tensors["labels"][:, 1:].flatten(), reduction="none",
                label_smoothing=SETTINGS["label_smoothing"],
            )  # fmt: skip
            (losses.sum() / n_learned).backward()
            total += float(losses.detach().sum()) / n_learned
            if variant != "bfloat16-not-said":
                step_arrays[f"step{step}.micro{k}.logits"] = logits
            step_arrays[f"step{step}.micro{k}.token_losses"] = losses
        grads = {f"step{step}.grad.{name}": p.grad.clone() for name, p in trainable.items()}
        norm = torch.nn.utils.clip_grad_norm_(trainable.values(), SETTINGS["max_grad_norm"])
        if variant == "clipped-gradients":
            grads = {f"step{step}.grad.{name}": p.grad.clone() for name, p in trainable.items()}
        optimizer.step()
        step_arrays |= grads | {f"step{step}.loss": total, f"step{step}.grad_norm": norm}
        for name, parameter in trainable.items():
            state = optimizer.state[parameter]
            step_arrays |= {f"step{step}.{kind}.{name}": state[kind].clone() for kind in ("exp_avg", "exp_avg_sq")}
            step_arrays[f"step{step}.param.{name}"] = parameter.detach().clone()
    return {name: torch.as_tensor(array).detach().float().numpy() for name, array in step_arrays.items()}


def block_mask(documents: np.ndarray) -> torch.Tensor:
    """Make the mask of packed rows as transformers takes it, (rows, 1, n, n): -inf for hidden keys, else 0."""
    is_visible = np.tril(documents[:, None, :, None] == documents[:, None, None])
    return torch.tensor(np.where(is_visible, 0.0, -np.inf), dtype=torch.float32)
