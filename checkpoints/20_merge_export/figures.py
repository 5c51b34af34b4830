"""Figure of lesson 20: the error of rounded weights, with and without an adapter merged into them."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from llorch.judging.expectations.training import stored
from llorch.judging.runners.training_numpy import logits_of
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import Adapter
from llorch.lora.merge import MergedWeights


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to 8 bits, to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


ROUNDED = {
    "float32": lambda x: x.astype(np.float32),
    "float16": lambda x: x.astype(np.float16),
    "bfloat16": bfloat16,
}


class Rounded(MergedWeights):
    """Matrices rounded as they are read; arithmetic is float64."""

    def __init__(self, weights: Any, adapter: Any, dtype: str) -> None:
        """Merge all of an adapter, or none of it."""
        super().__init__(weights, adapter)
        self._round = ROUNDED[dtype]

    def read(self, name: str) -> np.ndarray:
        """Read a weight and round it."""
        return self._round(super().read(name)).astype(np.float64)


def dtypes() -> Figure:
    """Plot the errors of logits, as shares."""
    weights, golden = stored("micro-llama")
    weights, adapter = weights.astype(np.float64), golden.adapter_for(weights.config)
    documents = [ids for ids, _ in golden.batches[0].each_document()]
    none = Adapter(adapter.config, {}, {})
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    right = {"base": logits_of(weights, documents), "merged": logits_of(AdaptedWeights(weights, adapter), documents)}
    for shift, (label, lora) in zip((-0.2, 0.2), (("base", none), ("merged", adapter)), strict=True):
        rounded = [logits_of(Rounded(weights, lora, dtype), documents) for dtype in ROUNDED]
        errors = [np.linalg.norm(logits - right[label]) / np.linalg.norm(right[label]) for logits in rounded]
        axes.bar(np.arange(len(errors)) + shift, errors, 0.4, label=label)
    effect = np.linalg.norm(right["merged"] - right["base"]) / np.linalg.norm(right["base"])
    axes.axhline(effect, color="#7d7d7d", linestyle="--", linewidth=1)
    axes.text(-0.4, effect * 0.8, "what the adapter changes", va="top", fontsize=9)
    axes.set(yscale="log", ylabel="error of the logits", ylim=(1e-8, 100))
    axes.set_xticks(range(len(ROUNDED)), list(ROUNDED))
    axes.legend(frameon=False, loc="upper right", ncols=2)
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"dtypes": dtypes()}
