"""The truth: what transformers, unmodified, computes in pure float64; and how far goldens are from it.

Nothing here was computed by us. *Chained* the truth is a run of the whole model. *Isolated* it is what that engine
makes of a golden's own inputs, stage by stage; only the golden's distance from it is kept, because what we make of
those inputs is judged by the golden, and in float64 by the chained truth.
"""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import numpy as np

from llorch.config import ModelConfig
from llorch.stages import Stage, key, keys
from llorch.verify.compare import Difference, measure
from llorch.verify.goldens import Evidence, Truth, calls_for, shown_by
from llorch.verify.limits import SCORES
from llorch.verify.places import Pass
from llorch.verify.witnesses import Call, Say, open_producer

WITNESS = "transformers-float64"  # its name in rows
ATTENTION = "attention"  # stands for scores, probabilities and context as one op


def take_truth(
    path: str | Path,
    cases: Mapping[str, Pass],
    evidence: Mapping[str, Evidence],
    *,
    n_greedy: int,
    say: Say | None = None,
) -> Truth:
    """Run the engine in float64.

    Args:
        path: A GGUF file or a Hugging Face folder.
        cases: The inputs.
        evidence: What each producer showed for them.
        n_greedy: Length of the greedy continuation.
        say: Told how far it is, where the model is so large that one layer at a time is in memory.

    Returns:
        The truth.

    Raises:
        MissingExtra: transformers is not installed.
        RuntimeError: It does not run the model, or not in float64.
    """
    with open_producer("transformers", path, dtype="float64", say=say) as engine:
        asked = calls_for(cases, n_greedy)
        calls = [*asked]
        for theirs in evidence.values():
            for case, this in cases.items():
                calls += _isolated(engine.config, this, theirs.traces[case])
        answers = iter(engine.together(calls))
        shown = shown_by(engine, cases, list(islice(answers, len(asked))))
        distances = {
            producer: {
                case: _distances(engine.config, theirs.traces[case], next(answers), next(answers)) for case in cases
            }
            for producer, theirs in evidence.items()
        }
        near = cases["near"].ids
        (logits,) = engine.together([("logits", ((*near, *shown.greedy[:-1].tolist()),), {})])
        return Truth(shown, logits[len(near) - 1 :], distances)


def _isolated(config: ModelConfig, this: Pass, golden: Mapping[str, np.ndarray]) -> list[Call]:
    """Runs that are given a golden at every stage, and at all but those inside of attention."""
    fused = {name: golden[name] for name, stage, _ in keys(config) if stage.name not in SCORES}
    return [
        ("trace", (this.ids,), {"first_position": this.first_position, "golden": given}) for given in (golden, fused)
    ]


def _distances(
    config: ModelConfig,
    golden: Mapping[str, np.ndarray],
    true: Mapping[str, np.ndarray],
    fused: Mapping[str, np.ndarray],
) -> dict[str, Difference]:
    """How far a golden is from what these runs made of its own inputs."""
    stages = {name: stage for name, stage, _ in keys(config)}
    found = {name: distance(array, true[name], stages[name]) for name, array in golden.items()}
    for layer in range(config.n_layers):
        name = key("attn_context", layer)
        found[key(ATTENTION, layer)] = distance(golden[name], fused[name], stages[name])
    return found


def distance(array: np.ndarray, true: np.ndarray, stage: Stage) -> Difference:
    """How far a stage, in any float dtype, is from its truth in float64."""
    return measure(array.astype(true.dtype), true, masked=stage.masked)
