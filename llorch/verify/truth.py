"""The truth: what transformers, unmodified, computes in pure float64; and how far goldens are from it.

Nothing here was computed by us. *Chained* the truth is a run of the whole model. *Isolated* it is what that engine
makes of a golden's own inputs, stage by stage; only the golden's distance from it is kept, because what we make of
those inputs is judged by the golden, and in float64 by the chained truth.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llorch.stages import Stage, key, keys
from llorch.verify.compare import Difference, measure
from llorch.verify.goldens import Distances, Evidence, Truth, take
from llorch.verify.limits import SCORES
from llorch.verify.places import Pass

WITNESS = "transformers-float64"  # its name in rows
ATTENTION = "attention"  # stands for scores, probabilities and context as one op


def take_truth(
    path: str | Path, cases: Mapping[str, Pass], evidence: Mapping[str, Evidence], *, n_greedy: int
) -> Truth:
    """Run the engine in float64.

    Args:
        path: A GGUF file or a Hugging Face folder.
        cases: The inputs.
        evidence: What each producer showed for them.
        n_greedy: Length of the greedy continuation.

    Returns:
        The truth.

    Raises:
        MissingExtra: transformers is not installed.
        RuntimeError: It does not run the model, or not in float64.
    """
    from llorch.verify.witnesses import open_producer

    with open_producer("transformers", path, dtype="float64") as engine:
        shown = take(engine, cases, n_greedy=n_greedy)
        near = cases["near"].ids
        steps = engine.logits((*near, *shown.greedy[:-1].tolist()))[len(near) - 1 :]
        return Truth(shown, steps, isolated_distances(engine, cases, evidence))


def isolated_distances(engine: Any, cases: Mapping[str, Pass], evidence: Mapping[str, Evidence]) -> Distances:
    """How far goldens are from what float64 makes of their own inputs.

    Args:
        engine: transformers in float64, on the model of the goldens.
        cases: The inputs.
        evidence: By producer.

    Returns:
        The distances.
    """
    return {
        producer: {case: _of_trace(engine, this, shown.traces[case]) for case, this in cases.items()}
        for producer, shown in evidence.items()
    }


def _of_trace(engine: Any, this: Pass, golden: Mapping[str, np.ndarray]) -> dict[str, Difference]:
    stages = {name: stage for name, stage, _ in keys(engine.config)}

    def alone(given: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return engine.trace(this.ids, first_position=this.first_position, golden=given)

    true = alone(golden)
    found = {name: distance(array, true[name], stages[name]) for name, array in golden.items()}
    fused = alone({name: array for name, array in golden.items() if stages[name].name not in SCORES})
    for layer in range(engine.config.n_layers):
        name = key("attn_context", layer)
        found[key(ATTENTION, layer)] = distance(golden[name], fused[name], stages[name])
    return found


def distance(array: np.ndarray, true: np.ndarray, stage: Stage) -> Difference:
    """How far a stage, in any float dtype, is from its truth in float64."""
    return measure(array.astype(true.dtype), true, masked=stage.masked)
