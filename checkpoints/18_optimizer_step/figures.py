"""Figure of lesson 18: one weight under AdamW and under common mistakes of it, from the same gradients."""

from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure

from llorch.apps.learn.exercises.training import adamw_step
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes
from llorch.judging.expectations.training import stored
from llorch.judging.goldens.training_recipe import CURVE, SMOOTHING, step_batches
from llorch.training.adamw import clip_by_norm
from llorch.training.numpy_step import loss_and_gradients

WEIGHT, INDEX = "layers.0.v_proj.lora_A", (0, 5)
SHOWN = (
    "adamw-no-bias-correction", "adamw-moment-not-weighted", "adamw-root-missing", "adamw-decay-in-gradient",
    "adamw-decay-not-times-rate", "adamw-betas-swapped",
)  # fmt: skip
RATE, BETAS = 5e-3, (0.9, 0.95)


def gradients() -> list[np.ndarray]:
    """List the gradients of one weight in the steps of the run of lesson 19, at a constant rate."""
    weights, golden = stored("micro-llama")
    weights, adapter = weights.astype(np.float32, keep=True), golden.adapter_for(weights.config)
    p = adapter.flat()
    m = v = {name: np.zeros_like(array) for name, array in p.items()}
    weight_gradients = []
    for step in range(1, CURVE.n_steps + 1):
        batches = step_batches(golden.batches, step, CURVE.accumulation)
        _, grads = loss_and_gradients(weights, adapter, batches, label_smoothing=SMOOTHING, parameters=p)
        grads, _ = clip_by_norm(grads, max_norm=1.0)
        updates = {n: adamw_step(p[n], g, m[n], v[n], step, RATE, *BETAS, 1e-8, 0.1) for n, g in grads.items()}
        p, m, v = ({name: update[i] for name, update in updates.items()} for i in range(3))
        weight_gradients.append(grads[WEIGHT][INDEX].reshape(1))
    return weight_gradients


def path() -> Figure:
    """Plot the path of the weight."""
    golden = stored("micro-llama")[1]
    start = golden.adapter_for(stored("micro-llama")[0].config).flat()[WEIGHT][INDEX].reshape(1)
    grads, typed = gradients(), typed_mistakes(BY_NUMBER["18"])["adamw_step"]
    figure = Figure(figsize=(6.8, 4.4), layout="constrained")
    axes = figure.subplots()
    right = run_updates(adamw_step, start, grads)
    for name in SHOWN:
        axes.plot(run_updates(typed[name], start, grads), linewidth=1.4, label=name)
    axes.plot(right, color="#7d7d7d", linewidth=3, label="right", zorder=0)
    axes.set(xlabel="step", ylabel=f"{WEIGHT}[{INDEX[0]}, {INDEX[1]}]")
    room = 2 * np.ptp(right)
    axes.set_ylim(right.min() - room, right.max() + room)
    figure.legend(frameon=False, fontsize=8, ncols=2, loc="outside lower center")
    return figure


def run_updates(update: Callable, start: np.ndarray, grads: list[np.ndarray]) -> np.ndarray:
    """Compute the weight after every step."""
    p, m, v, weights = start, np.zeros(1), np.zeros(1), [start[0]]
    for step, grad in enumerate(grads, 1):
        p, m, v = update(p, grad, m, v, step, RATE, *BETAS, 1e-8, 0.1)
        weights.append(p[0])
    return np.array(weights)


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"path": path()}
