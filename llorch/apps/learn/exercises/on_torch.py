"""Parts of lesson 14: a norm and a rotation of torch tensors, on whatever device these lie."""

from typing import Any

from llorch.apps.learn.exercise import Exercise

Tensor = Any  # of torch, which no other lesson waits for


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis in float32 or wider, and round once."""
    from llorch.apps.learn.on_torch.ours import our_rms_norm

    return our_rms_norm(x, weight, eps=eps)


def torch_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head of a batch in float32 or wider, and round once."""
    from llorch.apps.learn.on_torch.ours import our_rope

    return our_rope(x, cos, sin)


RMS_NORM = Exercise(
    name="torch_rms_norm", reference=torch_rms_norm, returns=("y",), on_torch=True,
    replaces="llorch.pytorch.causal_lm.rms_norm", stages=("attn_norm", "ffn_norm", "final_norm", "q_norm", "k_norm"),
    adapt=lambda call, right: lambda x, weight, *, eps: call(x=x, weight=weight.detach(), eps=eps),
)  # fmt: skip
ROPE = Exercise(
    name="torch_rope", reference=torch_rope, returns=("y",), on_torch=True,
    replaces="llorch.pytorch.causal_lm.rope", stages=("q_rope", "k_rope"),
    adapt=lambda call, right: lambda x, cos, sin: call(x=x, cos=cos, sin=sin),
)  # fmt: skip
