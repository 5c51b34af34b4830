"""Mistakes of checkpoint 17 in experts and delta nets: what is left out where a gradient goes back through them.

No training golden is stored for these families: their gradients are judged live, by PEFT.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from llorch.diagnosis.mistakes.mistake import ONE_STEP, Mistake
from llorch.families.config import ModelConfig

Function = Callable[..., Any]
OPS = "llorch.ops."
CHUNK = 4  # of the state that is cut; shorter than the documents of tests


def nothing(right: Function) -> Function:
    """Return a zero gradient."""
    return lambda *given, **how: np.zeros_like(right(*given, **how))


def sum_as_constant(right: Function) -> Function:
    """Treat the sum that divides the weights as a constant."""

    def wrong(grad: np.ndarray, probs: np.ndarray, ids: np.ndarray, *, normalised: bool) -> np.ndarray:
        total = np.take_along_axis(probs, ids, axis=-1).sum(axis=-1, keepdims=True)
        return right(grad / total, probs, ids, normalised=False)

    return wrong


def of_chosen_alone(right: Function) -> Function:
    """Set to 0 the gradient that the softmax sends to logits of experts whose probability got no gradient."""
    return lambda grad, probs: np.where(grad == 0, 0, right(grad, probs))


def unweighted(right: Function) -> Function:
    """Give experts the gradient of the sum without their weights."""
    return lambda grad, outs, weights: (
        np.broadcast_to(grad[:, None], outs.shape).copy(),
        right(grad, outs, weights)[1],
    )


def length_as_constant(right: Function) -> Function:
    """Treat the length as a constant: keep the part of the gradient that changes only the length."""

    def wrong(grad: np.ndarray, x: np.ndarray) -> np.ndarray:
        along = x * (grad * x).sum(axis=-1, keepdims=True) / (x * x).sum(axis=-1, keepdims=True)
        return right(grad, x) + along / np.sqrt((x * x).sum(axis=-1, keepdims=True))

    return wrong


def taps_turned(right: Function) -> Function:
    """Read the kernel of the convolution in the other direction."""
    return lambda grad, x, kernel: right(grad, x, np.ascontiguousarray(kernel[:, ::-1]))


def state_cut(right: Function) -> Function:
    """Send no gradient through the state between chunks."""
    n_tokens = 0

    def wrong(*given: Any) -> tuple[np.ndarray, ...]:
        nonlocal n_tokens
        n_tokens += 1
        d_state, *others = right(*given)
        return (d_state if n_tokens % CHUNK else np.zeros_like(d_state), *others)

    return wrong


def of_one_value_head(right: Function) -> Function:
    """Give a key only the gradient from the first of its value heads."""

    def wrong(grad: np.ndarray, q: np.ndarray, k: np.ndarray, *others: np.ndarray) -> tuple[np.ndarray, ...]:
        first = grad.reshape(len(grad), k.shape[1], -1, grad.shape[-1]).copy()
        first[:, :, 1:] = 0
        d_q, _, *rest = right(grad, q, k, *others)
        return d_q, right(first.reshape(grad.shape), q, k, *others)[1], *rest

    return wrong


def has_experts(config: ModelConfig) -> bool:
    """Tell if a model has layers with a router."""
    return config.experts is not None


def has_delta_net(config: ModelConfig) -> bool:
    """Tell if a model has layers with a state."""
    return config.delta_net is not None


def _family_gradient_mistake(
    name: str, part: str, wrong: Function, of: Callable[[ModelConfig], bool], diagnosis: str
) -> Mistake[Any]:
    return Mistake(
        name=f"gradient-{name}",
        stages=("gradient",),
        part=part,
        wrong=wrong,
        diagnosis=diagnosis,
        cases=ONE_STEP,
        applies_to=of,
    )


OF_FAMILIES: tuple[Mistake[Any], ...] = (
    _family_gradient_mistake(
        "router-left-out", OPS + "routing.router_probs_backward", nothing, has_experts,
        "The router got no gradient; its weights multiply the outputs of the experts.",
    ),
    _family_gradient_mistake(
        "routing-sum-as-constant", OPS + "routing.topk_weights_backward", sum_as_constant,
        lambda config: config.experts is not None and config.experts.norm_topk_prob,
        "The sum that divides the weights was treated as a constant; it depends on the probabilities.",
    ),
    _family_gradient_mistake(
        "router-softmax-of-chosen", OPS + "routing.router_probs_backward", of_chosen_alone,
        lambda config: config.experts is not None and not config.experts.norm_topk_prob,
        "Logits of experts that were not chosen got no gradient; the softmax divides by all of them.",
    ),
    _family_gradient_mistake(
        "experts-unweighted", OPS + "routing.mixed_backward", unweighted, has_experts,
        "Each expert got the whole gradient of the sum; it gets the share of its weight.",
    ),
    _family_gradient_mistake(
        "gate-as-constant", OPS + "sigmoid.sigmoid_backward", nothing,
        lambda config: config.attention_gate or (config.experts is not None and config.experts.shared_gate),
        "A gate was treated as a constant; it depends on the token.",
    ),
    _family_gradient_mistake(
        "decay-left-out", OPS + "delta_rule.log_decay_backward", nothing, has_delta_net,
        "The decay was treated as a constant; in_proj_a computes it from the token.",
    ),
    _family_gradient_mistake(
        "state-cut-between-chunks", OPS + "delta_rule_backward.token_backward", state_cut, has_delta_net,
        "The state passed no gradient to the previous chunk; later tokens read what that chunk wrote.",
    ),
    _family_gradient_mistake(
        "delta-keys-of-one-head", OPS + "delta_rule_backward.delta_rule_backward", of_one_value_head, has_delta_net,
        "A key got the gradient of one value head; it gets the sum over all heads that read it.",
    ),
    _family_gradient_mistake(
        "l2-norm-as-constant", OPS + "delta_rule.l2_norm_backward", length_as_constant, has_delta_net,
        "The length of a key was treated as a constant; it depends on the key and removes the gradient along it.",
    ),
    _family_gradient_mistake(
        "conv-taps-turned", OPS + "short_conv.short_conv_backward", taps_turned, has_delta_net,
        "The kernel was not reversed for the gradient; a value contributes to later tokens, not to earlier ones.",
    ),
)  # fmt: skip
