"""Tolerances of runs in bfloat16 and float16, made from engines that run in that dtype.

The truth stays what it is for float32: transformers in float64, with the weights as they are stored. Rounding them is
part of what a run in half precision does. transformers rounds weights and every activation, llama.cpp rounds weights
and what they are multiplied with, and keeps everything else in float32.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from llorch.config import ModelConfig
from llorch.files import Weights
from llorch.numerics import DtypeName
from llorch.stages import key, keys
from llorch.verify.compare import FLOORS, Tolerance
from llorch.verify.goldens import PRODUCERS, Errors, Evidence, Tolerances, Truth, not_run, take
from llorch.verify.replay import Pass
from llorch.verify.truth import WITNESS, truth_of
from llorch.verify.verifier import WORST, Verifier, angle_error
from llorch.verify.witnesses import ProducerName, open_producer

IN_ONE_OP = 4  # roundings: of the weights, of the result, and of two things in between
FROM_FLOAT32 = ("probabilities",)  # made from float32 logits in every run


def half_tolerances(
    weights: Weights,
    cases: Mapping[str, Pass],
    truth: Truth | None,
    path: Path,
    dtype: DtypeName,
    say: Callable[[str], None] = lambda line: None,
    *,
    producers: Sequence[ProducerName] = PRODUCERS,
    failed: dict[str, str] | None = None,
) -> Tolerances:
    """Make the tolerances of one dtype for any model, from engines that run now.

    Args:
        weights: The model in float32, as it is stored.
        cases: The inputs.
        truth: Of the model; None grants the ceilings.
        path: Its GGUF file or Hugging Face folder.
        dtype: `bfloat16` or `float16`.
        say: Told what is being done.
        producers: The engines.
        failed: Filled with the engines that could not run the model, and why; without it such an error is raised.

    Returns:
        Case to mode to stage to tolerance; nothing when every engine failed.

    Raises:
        MissingExtra: An engine is not installed.
        RuntimeError: An engine failed.
        FormatError: A weight is out of the range of float16.
        OSError: No room for llama.cpp's copy of the weights.
    """
    evidence: dict[str, Evidence] = {}
    for name in producers:
        say(f"running {name} in {dtype}")
        with not_run(name, failed):
            with open_producer(name, path, dtype=dtype) as producer:
                shown = take(producer, cases, n_greedy=1)
            evidence[name] = shown
            if overflow := _overflow(shown):
                say(f"{name} in {dtype}: not finite from {overflow} on; tolerances are made from what is")
    if not evidence:
        return {}
    own: Truth | None = None
    if truth is not None:
        with not_run(WITNESS, failed):
            own = truth_of(truth, path, cases, evidence)
    return HalfVerifier(path.stem, weights, cases, evidence, own, dtype).tolerances()


def half_ceiling(config: ModelConfig, this: Pass, mode: str, dtype: DtypeName) -> Tolerance:
    """The largest tolerance of a run in half precision, whatever its engines show.

    An op adds the errors of a few roundings at most. In a chain every stage rounds, and errors of independent
    roundings add up as the root of their number. A wrong truth would be as far from every engine as another model is,
    so that its tolerances would end here and its rows fail; and it fails the float32 rows before that.

    Args:
        config: The model.
        this: The tokens; float32 angles of far positions cost what they cost in float32.
        mode: `isolated` or `chained`.
        dtype: Of the run.

    Returns:
        The ceiling.
    """
    roundings = IN_ONE_OP if mode == "isolated" else math.sqrt(sum(1 for _ in keys(config)))
    error = FLOORS[dtype] * roundings + angle_error(int(this.positions[-1]))
    return Tolerance(error, WORST * error)


def _overflow(shown: Evidence) -> str:
    """The first stage of an engine that holds infinity or no number, empty when there is none."""
    places = ((case, name, array) for case, trace in shown.traces.items() for name, array in trace.items())
    return next((f"{case} {name}" for case, name, array in places if not (array < np.inf).all()), "")


class HalfVerifier(Verifier):
    """Knows how far engines in half precision are from the truth; it has no rows of its own."""

    def __init__(
        self,
        name: str,
        weights: Weights,
        cases: Mapping[str, Pass],
        evidence: Mapping[str, Evidence],
        truth: Truth | None,
        dtype: DtypeName,
    ) -> None:
        """Prepare; nothing is computed yet.

        Args:
            name: Name of the model.
            weights: The model in float32, as it is stored.
            cases: The inputs.
            evidence: What each producer showed for them in this dtype.
            truth: As for float32, with the isolated distances of this evidence.
            dtype: `bfloat16` or `float16`.

        Raises:
            ValueError: A trace has not exactly the stages of the model.
        """
        super().__init__(name, weights, cases, evidence, truth)
        self.dtype: DtypeName = dtype

    def errors(self) -> Errors:
        """How far the producers are from the truth, with three digits; more would be noise.

        Returns:
            The largest error of all layers by name of the stage; chained, `block_out` of every layer by key too.
        """
        out: Errors = {}
        for d in self.distances():
            if d.stage in FROM_FLOAT32:
                continue
            stages = out.setdefault(d.producer, {}).setdefault(d.case, {}).setdefault(d.mode, {})
            error = float(f"{d.difference.error:.2e}")
            stages[d.stage] = max(error, stages.get(d.stage, 0.0))
            if (d.stage, d.mode) == ("block_out", "chained"):
                stages[key(d.stage, d.layer)] = error
        return out

    def ceiling_of(self, case: str, mode: str, stage: str) -> Tolerance:
        """The largest tolerance that is ever granted to a stage."""
        if stage in FROM_FLOAT32:
            return super().ceiling_of(case, mode, stage)
        return half_ceiling(self.weights.config, self.cases[case], mode, self.dtype)

    def _floor(self, stage: str) -> float:
        return super()._floor(stage) if stage in FROM_FLOAT32 else FLOORS[self.dtype]

    def _capped(self, made: Tolerance, case: str, mode: str, stage: str) -> Tolerance:
        """Below the ceiling; one engine in half precision says as much of rounding as two do."""
        return made.at_most(self.ceiling_of(case, mode, stage))
