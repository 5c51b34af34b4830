"""llorch's kernels compared with torch's own modules, on the device of the run."""

import math
from collections.abc import Iterator

from llorch.judging.judge import Comparison
from llorch.pytorch.device import Target
from llorch.pytorch.kernels.kernel_selection import verdicts
from llorch.pytorch.kernels.table import kernels_for
from llorch.stages.comparison import FAIL, PASS

CHECKPOINT, ENGINE = "14", "torch"


def kernel_rows(target: Target) -> Iterator[Comparison]:
    """Try every kernel anew; an error is a part of what is allowed, and the note has the time beside torch's."""
    kinds = [*kernels_for(target.device, target.dtype, required=True)]
    for kind, verdict in (verdicts(target, kinds, anew=True) if kinds else {}).items():
        fault, note = verdict.fault(timed=False), f"{verdict.slow:.2f} times the time of torch's kernel"
        yield Comparison(
            model="kernels",
            checkpoint=CHECKPOINT,
            stage=kind,
            layer=None,
            case="tried",
            engine=ENGINE,
            backend=str(target),
            mode="isolated",
            error=verdict.off,
            worst=verdict.off,
            reference_error=math.nan,
            engine_error=math.nan,
            tolerance=1.0,
            tolerance_worst=1.0,
            verdict=FAIL if fault else PASS,
            note=fault or note,
        )
