"""Figures of lesson 17: a gradient check by finite differences, and every tensor next to PEFT's."""

import numpy as np
from matplotlib.figure import Figure

from llorch.diagnosis.mistakes import TRAINING
from llorch.diagnosis.mistakes.mistake import injected
from llorch.judging.expectations.training import stored
from llorch.judging.expectations.training_refs import of_tensors
from llorch.ops.precision import own_dtype_only
from llorch.ops.swiglu import swiglu, swiglu_backward
from llorch.training.numpy_step import loss_and_gradients

MISTAKES = {mistake.name: mistake for mistake in TRAINING}


def difference() -> Figure:
    """Plot the error of central differences of SwiGLU against the step."""
    rng = np.random.default_rng(0)
    gate, up, grad = (rng.standard_normal((256, 64)) for _ in range(3))
    right, _ = swiglu_backward(grad, gate, up)
    steps = np.logspace(-13, 0, 53)
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    for dtype, colour in ((np.float32, "C1"), (np.float64, "C0")):
        errors = []
        for step in steps:
            above, below = ((gate + sign * step).astype(dtype) for sign in (1, -1))
            with own_dtype_only():
                moved = swiglu(above, up.astype(dtype)).astype(np.float64) - swiglu(below, up.astype(dtype))
            errors.append(np.linalg.norm(moved * grad / (2 * step) - right) / np.linalg.norm(right))
        axes.loglog(steps, errors, color=colour, linewidth=2, label=dtype.__name__)
    axes.set(xlabel="step h", ylabel="error of the difference", ylim=(1e-11, 10))
    axes.legend(frameon=False)
    return figure


def tensors() -> Figure:
    """Plot distances of gradients of layer 0 from float64: PEFT's, and exact ones with a mistake in them."""
    weights, golden = stored("micro-llama")
    adapter, config = golden.adapter_for(weights.config), weights.config
    float64_weights = weights.astype(np.float64, keep=True)
    with injected(MISTAKES["gradient-softmax-as-sigmoid"]):
        _, wrong = loss_and_gradients(float64_weights, adapter, golden.batches[:1], label_smoothing=0.0)
    stage_refs = {n: p for n, p in of_tensors("gradient", config.n_layers).items() if p.layer == config.n_layers - 1}
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.subplots()
    gradients = {
        "PEFT in float32": [golden.shown(p) for p in stage_refs.values()],
        "softmax as sigmoid": [*map(wrong.get, stage_refs)],
    }
    for shift, (label, arrays) in zip((-0.2, 0.2), gradients.items(), strict=True):
        reference = [golden.reference("chained", stage_ref) for stage_ref in stage_refs.values()]
        errors = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(arrays, reference, strict=True)]
        axes.bar(np.arange(len(errors)) + shift, np.maximum(errors, 1e-9), 0.4, label=label)
    axes.axhline(3.9e-6, color="#7d7d7d", linestyle="--", linewidth=1)
    axes.set(yscale="log", ylabel="distance from float64", ylim=(1e-8, 30))
    axes.set_xticks(range(len(stage_refs)), [p.part for p in stage_refs.values()], rotation=60, ha="right", fontsize=8)
    axes.legend(frameon=False, ncols=2)
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"difference": difference(), "tensors": tensors()}
