"""Known mistakes in the backward pass of experts and delta nets: each maps a right function to a wrong one.

No training golden is stored for these families: tests compare their gradients with PEFT.
"""

from typing import Any

import numpy as np

from llorch.diagnosis.mistakes.mistake import Mistake, training_mistake
from llorch.diagnosis.mistakes.planting import Function
from llorch.diagnosis.mistakes.training_gradients import GRADIENT, OPS, gradient_missing
from llorch.families.config import ModelConfig

CHUNK = 4  # tokens between cuts of the state's gradient; shorter than the tests' documents


def sum_as_constant(right: Function) -> Function:
    """Treat the sum that normalises the expert weights as a constant."""

    def wrong(grad: np.ndarray, probs: np.ndarray, ids: np.ndarray, *, normalised: bool) -> np.ndarray:
        total = np.take_along_axis(probs, ids, axis=-1).sum(axis=-1, keepdims=True)
        return right(grad / total, probs, ids, normalised=False)

    return wrong


def selected_logits_only(right: Function) -> Function:
    """Set the gradient of a router logit to 0 if the expert's probability has no gradient."""
    return lambda grad, probs: np.where(grad == 0, 0, right(grad, probs))


def unweighted(right: Function) -> Function:
    """Pass the gradient of the sum to the experts without their weights."""
    return lambda grad, outs, weights: (
        np.broadcast_to(grad[:, None], outs.shape).copy(),
        right(grad, outs, weights)[1],
    )


def length_as_constant(right: Function) -> Function:
    """Treat the norm as a constant: keep the component of the gradient along the key."""

    def wrong(grad: np.ndarray, x: np.ndarray) -> np.ndarray:
        along = x * (grad * x).sum(axis=-1, keepdims=True) / (x * x).sum(axis=-1, keepdims=True)
        return right(grad, x) + along / np.sqrt((x * x).sum(axis=-1, keepdims=True))

    return wrong


def taps_turned(right: Function) -> Function:
    """Reverse the kernel of the convolution."""
    return lambda grad, x, kernel: right(grad, x, np.ascontiguousarray(kernel[:, ::-1]))


def state_cut(right: Function) -> Function:
    """Pass no gradient through the state between chunks; `right` is called once a token, from the last to the first."""
    n_tokens = 0

    def wrong(*args: np.ndarray) -> tuple[np.ndarray, ...]:
        nonlocal n_tokens
        n_tokens += 1
        d_state, *other_grads = right(*args)
        return (d_state if n_tokens % CHUNK else np.zeros_like(d_state), *other_grads)

    return wrong


def keys_of_one_value_head(right: Function) -> Function:
    """Pass to a key only the gradient of its first value head."""

    def wrong(grad: np.ndarray, q: np.ndarray, k: np.ndarray, *args: np.ndarray) -> tuple[np.ndarray, ...]:
        first_head = grad.reshape(len(grad), k.shape[1], -1, grad.shape[-1]).copy()
        first_head[:, :, 1:] = 0
        d_q, _, *other_grads = right(grad, q, k, *args)
        return d_q, right(first_head.reshape(grad.shape), q, k, *args)[1], *other_grads

    return wrong


def has_experts(config: ModelConfig) -> bool:
    """Tell if a model has layers with a router."""
    return config.experts is not None


def has_delta_net(config: ModelConfig) -> bool:
    """Tell if a model has delta-net layers."""
    return config.delta_net is not None


OF_FAMILIES: tuple[Mistake[Any], ...] = (
    training_mistake("gradient-router-left-out", GRADIENT, OPS + "routing.router_probs_backward", gradient_missing,
        "The router got no gradient; its weights multiply the outputs of the experts.", applies_to=has_experts),
    training_mistake("gradient-routing-sum-as-constant", GRADIENT, OPS + "routing.topk_weights_backward",
        sum_as_constant,
        "The sum that divides the weights was treated as a constant; it depends on the probabilities.",
        applies_to=lambda config: config.experts is not None and config.experts.norm_topk_prob),
    training_mistake("gradient-router-softmax-of-chosen", GRADIENT, OPS + "routing.router_probs_backward",
        selected_logits_only,
        "Logits of experts that were not chosen got no gradient; the softmax divides by all of them.",
        applies_to=lambda config: config.experts is not None and not config.experts.norm_topk_prob),
    training_mistake("gradient-experts-unweighted", GRADIENT, OPS + "routing.mixed_backward", unweighted,
        "Each expert got the whole gradient of the sum; it gets the share of its weight.", applies_to=has_experts),
    training_mistake("gradient-gate-as-constant", GRADIENT, OPS + "sigmoid.sigmoid_backward", gradient_missing,
        "A gate was treated as a constant; it depends on the token.",
        applies_to=lambda config: config.attention_gate or (config.experts is not None and config.experts.shared_gate)),
    training_mistake("gradient-decay-left-out", GRADIENT, OPS + "delta_rule.log_decay_backward", gradient_missing,
        "The decay was treated as a constant; in_proj_a computes it from the token.", applies_to=has_delta_net),
    training_mistake("gradient-state-cut-between-chunks", GRADIENT, OPS + "delta_rule_backward.token_backward",
        state_cut,
        "The state passed no gradient to the previous chunk; later tokens read what that chunk wrote.",
        applies_to=has_delta_net),
    training_mistake("gradient-delta-keys-of-one-head", GRADIENT, OPS + "delta_rule_backward.delta_rule_backward",
        keys_of_one_value_head,
        "A key got the gradient of one value head; it gets the sum over all heads that read it.",
        applies_to=has_delta_net),
    training_mistake("gradient-l2-norm-as-constant", GRADIENT, OPS + "delta_rule.l2_norm_backward", length_as_constant,
        "The length of a key was treated as a constant; it depends on the key and removes the gradient along it.",
        applies_to=has_delta_net),
    training_mistake("gradient-conv-taps-turned", GRADIENT, OPS + "short_conv.short_conv_backward", taps_turned,
        "The kernel was not reversed for the gradient; a value contributes to later tokens, not to earlier ones.",
        applies_to=has_delta_net),
)  # fmt: skip
