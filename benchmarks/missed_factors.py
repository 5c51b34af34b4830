"""Plant a common factor into every stage of the torch path in half precision, and count the comparisons that see it.

    python benchmarks/missed_factors.py                                   all built-in models in bfloat16
    python benchmarks/missed_factors.py micro-qwen3 --dtype float16
    python benchmarks/missed_factors.py --factor 1.005

Each stage is multiplied as it is shown and rounded to the dtype of the run, so each comparison sees a factor of its
own. Isolated comparisons judge the factor (`llorch/judging/tolerances/factors.py`). Chained ones and gradients judge
the error alone. Exit code 1: less than 90 % of the isolated comparisons fail.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np
import torch

from llorch.judging.expectations.forward import ForwardExpectations
from llorch.judging.expectations.training import comparisons, make_expectations
from llorch.judging.expectations.training import stored as stored_training
from llorch.judging.goldens.training import MODELS as TRAINED
from llorch.judging.runner_check import RunnerCheck
from llorch.judging.runners import Runner, StageObserver
from llorch.judging.runners.torch import torch_runners
from llorch.judging.runners.torch_observed import WIDENED
from llorch.judging.runners.training_torch import DTYPES as TRAINED_DTYPES
from llorch.judging.runners.training_torch import TorchTrainingRunner
from llorch.judging.tolerances.training import NUMPY_ALONE
from llorch.judging.types import Comparison
from llorch.judging.verify import stored
from llorch.pytorch.device import Target, target
from llorch.runtime.builtin import EVERY
from llorch.stages.comparison import FAIL
from llorch.stages.table import BY_NAME

ENOUGH = 0.9  # of the isolated comparisons
MODES = ("isolated", "chained")
FEW = "few numbers, or few large ones, make up the sums"
WHY = {  # a stage misses a factor
    "attn_context": "where attention is fused, one rounded key moves all later queries",
    "delta_state": "one rounded key or decay moves all that follows in its head",
    "delta_out": "one rounded key or decay moves all that follows in its head",
    "log_decay": "a rounded decay is a factor of its head, and one head makes up most",
    "shared_gate": "one row of rounded weights moves all tokens",
    "moe_out": "a rounded weight of an expert moves all channels of its token, for few tokens",
}


@dataclass
class Seen:
    """Verdicts of one stage, and the largest tolerance of its factor."""

    verdicts: Counter[tuple[str, bool]] = field(default_factory=Counter)
    tolerance: float = 0.0

    def add(self, comparison: Comparison) -> None:
        """Count a comparison."""
        self.verdicts[comparison.mode, comparison.verdict == FAIL] += 1
        if comparison.mode == "isolated":
            self.tolerance = max(self.tolerance, comparison.tolerance.common_factor or 0.0)

    def of(self, mode: str) -> tuple[int, int]:
        """Count the comparisons that fail, and all."""
        red = self.verdicts[mode, True]
        return red, red + self.verdicts[mode, False]


class WithFactor:
    """A runner whose stages are shown with a factor."""

    def __init__(self, runner: Runner, at: Target, factor: float) -> None:
        """Wrap a runner."""
        self._runner, self._at, self._factor = runner, at, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def isolated(self, this: Any, golden: Any, observe: StageObserver) -> None:
        """See `Runner.isolated`."""
        self._runner.isolated(this, golden, self._injected(observe))

    def chained(self, case: str, this: Any, observe: StageObserver, **how: Any) -> None:
        """See `Runner.chained`."""
        self._runner.chained(case, this, self._injected(observe), **how)

    def _injected(self, observe: StageObserver) -> StageObserver:
        return lambda name, array, **how: observe(name, times(array, self._factor, name, self._at), **how)


def times(array: np.ndarray, factor: float, name: str, at: Target) -> np.ndarray:
    """Multiply a stage, and round it to the dtype of the run; a choice of experts has no factor."""
    stage = name.rpartition(".")[2]
    if array.dtype.kind != "f":
        return array
    made = torch.from_numpy(array) * factor
    return (made if stage in WIDENED else made.to(at.dtype)).to(torch.float32).numpy()


def forward_rows(model: str, at: Target, factor: float) -> Iterator[Comparison]:
    """Judge every stage of a built-in model, isolated and chained."""
    weights, golden = stored(model)
    suite = ForwardExpectations(model, weights, golden.cases, golden.engine_outputs, golden.reference)
    for runner in torch_runners(at)(weights, wide=True):
        injected: Any = WithFactor(runner, at, factor)
        yield from (c for c in RunnerCheck(suite, injected).stage_rows() if not BY_NAME[c.stage_ref.name].is_choice)


def gradient_rows(model: str, at: Target, factor: float) -> Iterator[Comparison]:
    """Judge the gradients of a built-in model that is trained, chained."""
    weights, golden = stored_training(model)
    runner = TorchTrainingRunner(weights, golden, at, as_trainer=False)
    made = {stage_ref: array * factor for stage_ref, array in runner.chained() if stage_ref.stage == "gradient"}
    expectations = (
        expectation
        for expectation in make_expectations(golden, weights.config, at.dtype_name)
        if expectation.stage_ref.stage == "gradient" and expectation.mode == "chained"
    )
    return comparisons(model, expectations, {"chained": made}, str(at), left_out=NUMPY_ALONE)


def table(seen: Mapping[str, Seen]) -> Iterator[str]:
    """Yield a line for each stage: the comparisons that fail, and the reason if some isolated ones do not."""
    yield f"{'stage':16} {'isolated':>12} {'chained':>12}  tolerance of the factor"
    for stage in (name for name in BY_NAME if name in seen):
        red, n = seen[stage].of("isolated")
        cells = "".join(f" {'{} of {}'.format(*seen[stage].of(mode)):>12}" for mode in MODES)
        why = "" if red == n else f"   {WHY.get(stage, FEW)}"
        yield f"{stage:16}{cells}  {seen[stage].tolerance:.4f}{why}"


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("models", nargs=-1, type=click.Choice(EVERY))
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["bfloat16", "float16"]))
@click.option("--device", default="cpu", show_default=True)
@click.option("--factor", default=1.01, show_default=True)
def main(models: tuple[str, ...], dtype: str, device: str, factor: float) -> None:
    """Entry point."""
    at, seen, gradients = target(device, dtype), defaultdict[str, Seen](Seen), Counter[bool]()
    for model in models or EVERY:
        of_model = Seen()
        for comparison in forward_rows(model, at, factor):
            seen[comparison.stage_ref.name].add(comparison)
            of_model.add(comparison)
        click.echo(f"{model}: {'{} of {}'.format(*of_model.of('isolated'))} isolated comparisons fail", err=True)
        if model in TRAINED and dtype in TRAINED_DTYPES:
            gradients.update(c.verdict == FAIL for c in gradient_rows(model, at, factor))
    click.echo("\n".join(table(seen)))
    totals = {mode: np.sum([each.of(mode) for each in seen.values()], axis=0) for mode in MODES}
    shares = ", ".join(f"{red} of {n} {mode} comparisons ({red / n:.0%})" for mode, (red, n) in totals.items())
    click.echo(
        f"{at}, a factor of {factor:g} is seen in {shares} and {gradients[True]} of {gradients.total()} gradients"
    )
    red, n = totals["isolated"]
    sys.exit(0 if red >= ENOUGH * n else 1)


if __name__ == "__main__":
    main()
