"""Figures of lesson 14: the bits of four formats, and how errors grow from layer to layer."""

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from llorch.judging.expectations.forward import ForwardExpectations
from llorch.judging.verify import stored
from llorch.stages.comparison import distance
from llorch.stages.table import BY_NAME

BLUE, LIT, GREY = "#2f81f7", "#d9702b", "#7d7d7d"
FORMATS = {"float32": (8, 23), "TF32": (8, 10), "bfloat16": (8, 7), "float16": (5, 10)}  # exponent, fraction
LIMITS = {"bfloat16": BLUE, "float16": "#8250df", "float32": LIT}
ENGINES = {"transformers": "s", "llamacpp": "o"}


def formats() -> Figure:
    """Draw the formats: one sign bit, some bits for the size, the rest for digits."""
    figure = Figure(figsize=(7.2, 1.9), layout="constrained")
    axes = figure.subplots()
    for row, (name, (exponent, fraction)) in enumerate(FORMATS.items()):
        colours = [GREY, *[LIT] * exponent, *[BLUE] * fraction]
        for bit, colour in enumerate(colours):
            axes.add_patch(Rectangle((bit, -row), 0.9, 0.75, color=colour, alpha=0.7))
        axes.text(-0.4, 0.37 - row, name, ha="right", va="center")
        axes.text(len(colours) + 0.4, 0.37 - row, f"{exponent} + {fraction}", va="center", fontsize=9)
    axes.set(xlim=(-5.5, 37), ylim=(-3.2, 0.9))
    axes.axis("off")
    return figure


def ladder() -> Figure:
    """Plot the tolerance of a run of story after every layer, by dtype, and the errors of both engines in float32."""
    weights, golden = stored("story")
    assert golden.reference is not None
    suite = ForwardExpectations("story", weights, golden.cases, golden.engine_outputs, golden.reference)
    places = [*(f"l{layer}.block_out" for layer in range(weights.config.n_layers)), "logits"]
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.subplots()
    for dtype, colour in LIMITS.items():
        allowed = [suite.tolerances("near", dtype).chained(place, 0).error for place in places]
        axes.semilogy(places, allowed, color=colour, label=f"tolerance of {dtype}")
    exact = golden.reference.engine_output.traces["near"]
    for engine, marker in ENGINES.items():
        trace = golden.engine_outputs[engine].traces["near"]
        errors = [distance(trace[place], exact[place], BY_NAME[place.rpartition(".")[2]]).error for place in places]
        axes.semilogy(places, errors, marker, color=GREY, markersize=4, label=f"{engine}, float32")
    axes.set(ylabel="error", ylim=(1e-8, 1e-1))
    axes.tick_params(axis="x", rotation=30)
    axes.legend(frameon=False, ncols=2, loc="center", bbox_to_anchor=(0.5, 0.55))
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"formats": formats(), "ladder": ladder()}
