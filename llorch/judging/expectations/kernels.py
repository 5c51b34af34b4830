"""llorch's kernels compared with torch's own modules, on the device of the run."""

from collections.abc import Iterator

from llorch.judging.judge import Comparison
from llorch.pytorch.device import Target
from llorch.pytorch.kernels.kernel_selection import verdicts
from llorch.pytorch.kernels.table import kernels_for
from llorch.stages.comparison import FAIL, PASS, Difference, Tolerance
from llorch.stages.stage_ref import StageRef

CHECKPOINT, ENGINE = "14", "torch"


def kernel_rows(target: Target) -> Iterator[Comparison]:
    """Try every kernel anew; an error is a part of what is allowed, and the note has the time beside torch's."""
    kinds = [*kernels_for(target.device, target.dtype, required=True)]
    for kind, verdict in (verdicts(target, kinds, anew=True) if kinds else {}).items():
        fault, note = verdict.fault(timed=False), f"{verdict.slow:.2f} times the time of torch's kernel"
        yield Comparison(
            "kernels", StageRef(CHECKPOINT, kind, case="tried"), "isolated", ENGINE, str(target),
            Difference(verdict.off, verdict.off), Tolerance(1.0, 1.0), FAIL if fault else PASS, note=fault or note,
        )  # fmt: skip
