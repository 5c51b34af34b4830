"""Run the producers in bfloat16 and float16; used by `regenerate`.

Their traces are not stored, only the tolerances and distances that follow from them: goldens are those of float32.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llorch.files import Weights
from llorch.verify.compare import FACTOR
from llorch.verify.goldens import HALF_DTYPES, PRODUCERS, Evidence, Tolerances, Truth, take
from llorch.verify.half import HalfVerifier
from llorch.verify.replay import Pass
from llorch.verify.truth import truth_of
from llorch.verify.witnesses import open_producer

AGAIN = 1.001  # times that a tolerance may move which is made again from the same arrays, by float64 of another order


@dataclass(frozen=True)
class HalfRun:
    """What the producers showed in one dtype, and what they say about themselves."""

    verifier: HalfVerifier
    engines: Mapping[str, Mapping[str, object]]


def half_runs(name: str, weights: Weights, cases: Mapping[str, Pass], truth: Truth) -> dict[str, HalfRun]:
    """Run both producers on one model in every half-precision dtype.

    Args:
        name: The model.
        weights: Opened from its file.
        cases: The inputs.
        truth: Of the model.

    Returns:
        Dtype to its runs.
    """
    runs = {}
    for dtype in HALF_DTYPES:
        evidence: dict[str, Evidence] = {}
        engines: dict[str, Mapping[str, object]] = {}
        for producer_name in PRODUCERS:
            with open_producer(producer_name, weights.path, n_threads=2, dtype=dtype) as producer:
                evidence[producer_name] = take(producer, cases, n_greedy=1)
                engines[producer_name] = producer.provenance()
        own = truth_of(truth, weights.path, cases, evidence)
        runs[dtype] = HalfRun(HalfVerifier(name, weights, cases, evidence, own, dtype), engines)
    return runs


def differences(new: Mapping[str, Tolerances], stored: Mapping[str, Tolerances], times: float = FACTOR) -> list[str]:
    """Where newly made tolerances are not nearly the stored ones.

    Which way a value is rounded depends on the instructions that a CPU has, and so does how far the engines are off,
    most of all in one row or one element. They are right on another processor while they pass the stored tolerances,
    which grant `FACTOR` times what they were off where these were made; and those grant no more than that, if the
    engines are off by no less than a `FACTOR`th. Another dtype is off by 8.

    Args:
        new: Made now, by dtype.
        stored: Read from the repository.
        times: How many times larger or smaller a tolerance may be.

    Returns:
        One line for each difference.
    """
    ours, theirs = dict(_flat(new)), dict(_flat(stored))
    lines = [f"tolerance {' '.join(key)}: only on one side" for key in sorted(ours.keys() ^ theirs.keys())]
    for key in sorted(ours.keys() & theirs.keys()):
        if not 1 / times <= ours[key] / theirs[key] <= times:
            lines.append(
                f"tolerance {' '.join(key)}: {ours[key]:.2e}, stored {theirs[key]:.2e}, allowed {times:g} times"
            )
    return lines


def _flat(tolerances: Mapping[str, Tolerances]) -> Iterator[tuple[tuple[str, ...], float]]:
    for dtype, cases in tolerances.items():
        for case, modes in cases.items():
            for mode, stages in modes.items():
                for stage, made in stages.items():
                    yield (dtype, case, mode, stage, "error"), made.error
                    yield (dtype, case, mode, stage, "worst"), made.worst
