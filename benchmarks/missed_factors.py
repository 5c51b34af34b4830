"""Inject a common factor into every stage of the torch path in half precision; count comparisons that detect it.

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
from llorch.judging.tolerances.training import NUMPY_ONLY
from llorch.judging.types import Comparison
from llorch.judging.verify import stored
from llorch.pytorch.device import Target, target
from llorch.runtime.builtin import EVERY
from llorch.stages.comparison import FAIL
from llorch.stages.table import BY_NAME

ENOUGH = 0.9  # share of the isolated comparisons that must fail
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
class StageCounts:
    """Verdicts of one stage, and the largest tolerance of its factor."""

    verdicts: Counter[tuple[str, bool]] = field(default_factory=Counter)
    tolerance: float = 0.0

    def add(self, comparison: Comparison) -> None:
        """Count a comparison."""
        self.verdicts[comparison.mode, comparison.verdict == FAIL] += 1
        if comparison.mode == "isolated":
            self.tolerance = max(self.tolerance, comparison.tolerance.common_factor or 0.0)

    def of(self, mode: str) -> tuple[int, int]:
        """Count the comparisons that fail, and all comparisons."""
        n_failed = self.verdicts[mode, True]
        return n_failed, n_failed + self.verdicts[mode, False]


class RunnerWithFactor:
    """Runner whose observed stages are multiplied by a factor."""

    def __init__(self, runner: Runner, target: Target, factor: float) -> None:
        """Wrap a runner."""
        self._runner, self._at, self._factor = runner, target, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def isolated(self, inputs: Any, golden: Any, observe: StageObserver) -> None:
        """See `Runner.isolated`."""
        self._runner.isolated(inputs, golden, self._injected(observe))

    def chained(self, case: str, inputs: Any, observe: StageObserver, **options: Any) -> None:
        """See `Runner.chained`."""
        self._runner.chained(case, inputs, self._injected(observe), **options)

    def _injected(self, observe: StageObserver) -> StageObserver:
        return lambda name, array, **options: observe(name, times(array, self._factor, name, self._at), **options)


def times(array: np.ndarray, factor: float, name: str, target: Target) -> np.ndarray:
    """Multiply a stage, and round it to the dtype of the run; selected experts are integers and stay."""
    stage = name.rpartition(".")[2]
    if array.dtype.kind != "f":
        return array
    product = torch.from_numpy(array) * factor
    return (product if stage in WIDENED else product.to(target.dtype)).to(torch.float32).numpy()


def forward_rows(model: str, place: Target, factor: float) -> Iterator[Comparison]:
    """Judge every stage of a built-in model, isolated and chained."""
    weights, golden = stored(model)
    suite = ForwardExpectations(model, weights, golden.cases, golden.engine_outputs, golden.reference)
    for runner in torch_runners(place)(weights, has_reference=True):
        injected: Any = RunnerWithFactor(runner, place, factor)
        yield from (c for c in RunnerCheck(suite, injected).stage_rows() if not BY_NAME[c.stage_ref.name].is_selection)


def gradient_rows(model: str, place: Target, factor: float) -> Iterator[Comparison]:
    """Judge the gradients of a built-in model that is trained, chained."""
    weights, golden = stored_training(model)
    runner = TorchTrainingRunner(weights, golden, place, as_trainer=False)
    gradients = {stage_ref: array * factor for stage_ref, array in runner.chained() if stage_ref.stage == "gradient"}
    expectations = (
        expectation
        for expectation in make_expectations(golden, weights.config, place.dtype_name)
        if expectation.stage_ref.stage == "gradient" and expectation.mode == "chained"
    )
    return comparisons(model, expectations, {"chained": gradients}, str(place), left_out=NUMPY_ONLY)


def table(counts: Mapping[str, StageCounts]) -> Iterator[str]:
    """Yield a line for each stage: the comparisons that fail, and the reason if some isolated ones do not."""
    yield f"{'stage':16} {'isolated':>12} {'chained':>12}  tolerance of the factor"
    for stage in (name for name in BY_NAME if name in counts):
        n_failed, n_all = counts[stage].of("isolated")
        cells = "".join(f" {'{} of {}'.format(*counts[stage].of(mode)):>12}" for mode in MODES)
        reason = "" if n_failed == n_all else f"   {WHY.get(stage, FEW)}"
        yield f"{stage:16}{cells}  {counts[stage].tolerance:.4f}{reason}"


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("models", nargs=-1, type=click.Choice(EVERY))
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["bfloat16", "float16"]))
@click.option("--device", default="cpu", show_default=True)
@click.option("--factor", default=1.01, show_default=True)
def main(models: tuple[str, ...], dtype: str, device: str, factor: float) -> None:
    """Entry point."""
    place, counts, gradients = target(device, dtype), defaultdict[str, StageCounts](StageCounts), Counter[bool]()
    for model in models or EVERY:
        in_model = StageCounts()
        for comparison in forward_rows(model, place, factor):
            counts[comparison.stage_ref.name].add(comparison)
            in_model.add(comparison)
        click.echo(f"{model}: {'{} of {}'.format(*in_model.of('isolated'))} isolated comparisons fail", err=True)
        if model in TRAINED and dtype in TRAINED_DTYPES:
            gradients.update(c.verdict == FAIL for c in gradient_rows(model, place, factor))
    click.echo("\n".join(table(counts)))
    totals = {mode: np.sum([stage.of(mode) for stage in counts.values()], axis=0) for mode in MODES}
    shares = ", ".join(f"{bad} of {n} {mode} comparisons ({bad / n:.0%})" for mode, (bad, n) in totals.items())
    click.echo(
        f"{place}, a factor of {factor:g} is seen in {shares} and {gradients[True]} of {gradients.total()} gradients"
    )
    bad, n = totals["isolated"]
    sys.exit(0 if bad >= ENOUGH * n else 1)


if __name__ == "__main__":
    main()
