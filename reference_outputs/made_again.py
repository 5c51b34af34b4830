"""Comparison of new and stored tolerances, used by `make_training`."""

from collections.abc import Iterator, Mapping

from llorch.stages.comparison import FACTOR, Tolerance

Tolerances = Mapping[str, Mapping[str, Mapping[str, Tolerance]]]  # case -> mode -> stage -> tolerance
AGAIN = 1.001  # largest factor between tolerances from equal arrays, whose float64 sums differ in order


def differences(new: Mapping[str, Tolerances], old: Mapping[str, Tolerances], times: float = FACTOR) -> list[str]:
    """List newly made tolerances that are not close to the stored ones.

    The rounding of a value depends on the CPU's instructions, and so does an engine's error, most of all in one row or
    one element. A stored tolerance is `FACTOR` times the engine's distance on the machine that made it. An engine on
    another processor is correct while it passes, so its distance may grow by `FACTOR`; it may shrink by as much. An
    error of another dtype differs by a factor of 8.

    Args:
        new: Made now, by dtype.
        old: Read from the repository.
        times: How many times larger or smaller a tolerance may be.

    Returns:
        One line for each difference.
    """
    actual, expected = dict(_flat(new)), dict(_flat(old))
    lines = [f"tolerance {' '.join(key)}: only on one side" for key in sorted(actual.keys() ^ expected.keys())]
    for key in sorted(actual.keys() & expected.keys()):
        if not 1 / times <= actual[key] / expected[key] <= times:
            lines.append(
                f"tolerance {' '.join(key)}: {actual[key]:.2e}, stored {expected[key]:.2e}, allowed {times:g} times"
            )
    return lines


def _flat(tolerances: Mapping[str, Tolerances]) -> Iterator[tuple[tuple[str, ...], float]]:
    for dtype, cases in tolerances.items():
        for case, modes in cases.items():
            for mode, stages in modes.items():
                for stage, tolerance in stages.items():
                    yield (dtype, case, mode, stage, "error"), tolerance.error
                    yield (dtype, case, mode, stage, "worst"), tolerance.worst
