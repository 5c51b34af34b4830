"""Differences that are allowed between new and stored tolerances; used by `make_training`."""

from collections.abc import Iterator, Mapping

from llorch.stages.comparison import FACTOR, Tolerance

Tolerances = Mapping[str, Mapping[str, Mapping[str, Tolerance]]]  # case -> mode -> stage -> tolerance
AGAIN = 1.001  # times that a tolerance may move which is made again from the same arrays, by float64 of another order


def differences(new: Mapping[str, Tolerances], stored: Mapping[str, Tolerances], times: float = FACTOR) -> list[str]:
    """List newly made tolerances that are not close to the stored ones.

    The direction in which a value is rounded depends on the instructions of the CPU, and so does the error of an
    engine, most of all in one row or one element. Engines are right on another processor while they pass the stored
    tolerances, which grant `FACTOR` times what they were off where these were made; and those grant no more than that,
    if the engines are off by no less than a `FACTOR`th. Another dtype is off by 8.

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
