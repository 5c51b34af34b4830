"""Control dumps of training by PEFT, transformers and torch's AdamW, each as it is: differences that are no bugs."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.diagnosis.trainer import SETTINGS
from llorch.lora.adapter import Adapter
from llorch.runtime.builtin import builtin_path
from reference_outputs.peft_reference import Peft

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {}, "foreach": {"foreach": True}, "fused": {"fused": True}, "checkpointing": {"checkpointing": True},
    "bfloat16": {"dtype": "bfloat16"}, "bfloat16-not-said": {"dtype": "bfloat16"}, "clipped-gradients": {},
}  # fmt: skip


def peft_steps(
    model: str, adapter: Adapter, micros: list[list[dict[str, np.ndarray]]], variant: str
) -> dict[str, np.ndarray]:
    """Run some steps of PEFT on micro-batches; return the arrays of each step under the names of a dump."""
    how = dict(VARIANTS[variant])
    dtype, checkpointing = how.pop("dtype", "float32"), how.pop("checkpointing", False)
    net = Peft(builtin_path(model), dtype=dtype).adapted(adapter)
    if checkpointing:
        net.enable_input_require_grads()
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(), lr=SETTINGS["lr"], betas=SETTINGS["betas"], eps=SETTINGS["eps"],
        weight_decay=SETTINGS["weight_decay"], **how,
    )  # fmt: skip
    shown: dict[str, Any] = {}
    for step, batches in enumerate(micros, 1):
        learned = sum(int((micro["labels"][:, 1:] != -100).sum()) for micro in batches)
        optimizer.zero_grad()
        total = 0.0
        for k, micro in enumerate(batches, 1):
            given = {name: torch.tensor(array) for name, array in micro.items()}
            logits = net(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits
            losses = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), given["labels"][:, 1:].flatten(), reduction="none",
                label_smoothing=SETTINGS["label_smoothing"],
            )  # fmt: skip
            (losses.sum() / learned).backward()
            total += float(losses.detach().sum()) / learned
            if variant != "bfloat16-not-said":
                shown[f"step{step}.micro{k}.logits"] = logits
            shown[f"step{step}.micro{k}.token_losses"] = losses
        grads = {f"step{step}.grad.{name}": p.grad.clone() for name, p in trained.items()}
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), SETTINGS["max_grad_norm"])
        if variant == "clipped-gradients":
            grads = {f"step{step}.grad.{name}": p.grad.clone() for name, p in trained.items()}
        optimizer.step()
        shown |= grads | {f"step{step}.loss": total, f"step{step}.grad_norm": norm}
        for name, parameter in trained.items():
            state = optimizer.state[parameter]
            shown |= {f"step{step}.{kind}.{name}": state[kind].clone() for kind in ("exp_avg", "exp_avg_sq")}
            shown[f"step{step}.param.{name}"] = parameter.detach().clone()
    return {name: torch.as_tensor(array).detach().float().numpy() for name, array in shown.items()}
