"""Figure of lesson 19: thirty losses, and the distance of right and wrong runs from the golden ones."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.exercises.training import ACCUMULATED
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes
from llorch.judging.expectations.training import stored
from llorch.judging.expectations.training_refs import at
from llorch.judging.goldens.training_recipe import CURVE
from llorch.judging.runners.training_numpy import NumpyTrainingRunner

PLACE = at("loss_curve", case="curve")


def losses(accumulated: Any) -> np.ndarray:
    """Return the losses of a training run of `micro-llama` with a wrong function in place of llorch's."""
    weights, golden = stored("micro-llama")
    runner = NumpyTrainingRunner(weights.astype(np.float32, keep=True), golden)
    with Implementation("this figure", {"accumulated": accumulated}).installed([ACCUMULATED]):
        return dict(runner.curve(CURVE.n_steps))[PLACE]


def curve() -> Figure:
    """Plot the losses above, and distances from the float64 reference below."""
    golden = stored("micro-llama")[1]
    reference, limit = golden.reference("chained", PLACE), golden.tolerances["float32"]["chained"]["loss_curve"].worst
    tolerance = limit * np.abs(reference).max()
    steps = np.arange(1, CURVE.n_steps + 1)
    figure = Figure(figsize=(6.8, 5.2), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    above.plot(steps, reference, color="#7d7d7d", marker=".", label="golden")
    above.set(ylabel="loss")
    below.axhspan(1e-10, tolerance, color="#7d7d7d", alpha=0.2, linewidth=0)
    curves = {"PEFT in float32": golden.shown(PLACE)}
    curves |= {name: losses(function) for name, function in typed_mistakes(BY_NUMBER["19"])["accumulated"].items()}
    for colour, (name, run_losses) in enumerate(curves.items()):
        errors = np.maximum(np.abs(run_losses - reference), 2e-10)
        below.semilogy(steps, errors, color=f"C{colour}", linewidth=1.4, label=name.removeprefix("accumulation-"))
        outside = np.flatnonzero(errors > tolerance)
        if len(outside):
            above.plot(steps, run_losses, color=f"C{colour}", linewidth=1)
            below.plot(steps[outside[0]], errors[outside[0]], "o", color=f"C{colour}", markersize=9, fillstyle="none")
    below.set(xlabel="step", ylabel="off, in nats", ylim=(1e-10, 20))
    figure.legend(*below.get_legend_handles_labels(), frameon=False, ncols=4, fontsize=8, loc="outside lower center")
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"curve": curve()}
