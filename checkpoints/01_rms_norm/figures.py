"""Figures of lesson 01, of the numbers of the built-in models."""

import numpy as np
from matplotlib.figure import Figure

import llorch
from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import goldens_folder

GREY, BLUE, RED, AMBER = "#8b949e", "#2f81f7", "#e5484d", "#d29922"
SENTENCE = "Once upon a time there was a little fox"
MODELS = ("micro-llama", "micro-qwen2", "story")


def rms(x: np.ndarray) -> np.ndarray:
    """Compute the root mean square of every row."""
    return np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=-1))


def inputs(trace: dict[str, np.ndarray], n_layers: int) -> dict[str, np.ndarray]:
    """List the input of each norm, by the norm's name."""
    norm_inputs, x = {}, trace["embed"]
    for i in range(n_layers):
        norm_inputs |= {f"l{i} attn": x, f"l{i} ffn": trace[f"l{i}.attn_residual"]}
        x = trace[f"l{i}.block_out"]
    return norm_inputs | {"final": x}


def rows() -> Figure:
    """Plot the size of every token's row before and after each norm of story."""
    story, trace = llorch.load("story"), {}
    story.forward(story.tokenizer.encode(SENTENCE), trace=trace)
    norm_inputs = inputs(trace, story.config.n_layers)
    rms_before = np.array([rms(x) for x in norm_inputs.values()])
    eps = story.config.rms_norm_eps
    rms_after = np.array([rms(x / np.sqrt(rms(x)[:, None] ** 2 + eps)) for x in norm_inputs.values()])
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.semilogy(rms_before, color=GREY, linewidth=1, marker=".", label=["before", *["_"] * (rms_before.shape[1] - 1)])
    axes.semilogy(rms_after, color=BLUE, linewidth=2, label=["after the division", *["_"] * (rms_after.shape[1] - 1)])
    axes.set_xticks(range(len(norm_inputs)), list(norm_inputs), rotation=45, ha="right")
    axes.set_ylabel("root mean square of a row")
    axes.legend(frameon=False)
    return figure


def eps() -> Figure:
    """Plot the cost of each wrong eps, by the size of the row."""
    size = np.logspace(-3, 2.5, 200)
    right = np.sqrt(size**2 + 1e-5)
    wrong = {
        "eps forgotten": (size, RED),
        "eps after the root": (size + 1e-5, AMBER),
    }
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.subplots()
    for name, (divisor, colour) in wrong.items():
        axes.loglog(size, np.abs(right / divisor - 1), color=colour, linewidth=2, label=name)
    axes.axhline(6e-8, color=GREY, linestyle="--", linewidth=1)
    axes.text(size[0], 7e-8, "rounding of float32", color=GREY, va="bottom")
    for name, height in zip(MODELS, (3e-11, 1.5e-10, 7e-10), strict=True):
        trace = read(goldens_folder() / name).reference.engine_output.traces["near"]
        norm_inputs = inputs(dict(trace), sum(key.endswith(".block_out") for key in trace))
        sizes = np.concatenate([rms(x) for x in norm_inputs.values()])
        axes.plot(sizes, np.full(len(sizes), height), "|", color=GREY, markersize=6)
        axes.text(1.2e-3, height, name, color=GREY, va="center", fontsize=8)
    axes.set(ylim=(1e-11, 3), xlabel="root mean square of the row", ylabel="error of the result")
    axes.legend(frameon=False, loc="upper right")
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"rows": rows(), "eps": eps()}
