"""Random models of random sizes, a Hugging Face folder and its GGUF twin each, judged live by every engine that can.

    python benchmarks/family_sweep.py --n 30                           all families
    python benchmarks/family_sweep.py qwen3_moe llama4 --n 3 --torch   the torch path, too

transformers writes the folder; the converter of llama.cpp its twin, unless a GGUF file cannot express the model:
LLORCH_LLAMACPP names the source tree, which tests/support/fetch_vocabularies.py gets. Judged is all that `llorch
verify` judges of a file: every stage alone and chained, near and far, a split prefill, the text token for token.
A line for each model, then one for each family. Exit code 1: a stage failed.
"""

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import numpy as np
from family_sizes import FAMILIES, drawn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
ENGINES = ("llamacpp", "transformers")


@dataclass
class Judged:
    """Verdicts on one model."""

    family: str
    seed: int
    rows: int = 0
    judges: Counter[str] = field(default_factory=Counter)  # files that an engine judged
    twins: int = 0
    ties: int = 0
    failed: list[str] = field(default_factory=list)
    error: str = ""

    def __str__(self) -> str:
        """Write one line, and one more for each of the first failures."""
        said = f"{self.family} {self.seed}: {self.rows} rows, {self.ties} ties, {len(self.failed)} failed, "
        said += f"judged by {', '.join(f'{name} {n}' for name, n in self.judges.items())}"
        return "\n    ".join([said, *self.failed[:5], *([self.error] if self.error else [])])


@click.command(help=__doc__)
@click.argument("families", nargs=-1, type=click.Choice(list(FAMILIES)))
@click.option("--n", default=3, show_default=True, help="Models of each family.")
@click.option("--seed", default=0, show_default=True, help="The first model's.")
@click.option("--torch", "with_torch", is_flag=True, help="The torch path in float64 and float32, too.")
@click.option("--jobs", default=2, show_default=True)
def main(families: tuple[str, ...], n: int, seed: int, with_torch: bool, jobs: int) -> None:
    """Entry point."""
    if "LLORCH_LLAMACPP" not in os.environ:
        raise click.UsageError(
            "set LLORCH_LLAMACPP, see --help: without llama.cpp's converter nothing foreign makes the twins"
        )
    start, found = time.perf_counter(), list[Judged]()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        cases = [(name, seed + i, with_torch) for i in range(n) for name in families or FAMILIES]
        for done in as_completed([pool.submit(judged, *case) for case in cases]):
            found.append(done.result())
            click.echo(found[-1])
    for name in families or FAMILIES:
        click.echo(summary([one for one in found if one.family == name]))
    click.echo(f"{time.perf_counter() - start:.0f} s, {jobs} at a time")
    sys.exit(any(one.failed or one.error for one in found))


def summary(found: Sequence[Judged]) -> str:
    """Sum up one family in a line."""
    judges = sum((one.judges for one in found), Counter[str]())
    bad = sum(bool(one.failed or one.error) for one in found)
    return (
        f"{found[0].family:<12} {len(found)} models, {sum(one.twins for one in found)} twins: {bad} failed; "
        f"{sum(one.rows for one in found)} rows, {sum(one.ties for one in found)} ties; files judged by "
        + ", ".join(f"{name} {n}" for name, n in judges.items())
    )


def judged(family: str, seed: int, with_torch: bool) -> Judged:
    """Judge one model; record an error instead of raising it, so that the other models continue."""
    told = Judged(family, seed)
    sizes = drawn(family, seed)
    try:
        with tempfile.TemporaryDirectory(prefix="llorch-sweep-") as place:
            for path in files(family, seed, sizes, Path(place)):
                told.twins += path.suffix == ".gguf"
                judge(path, told, with_torch)
    except Exception as error:  # any fault of any engine belongs in the table
        told.error = f"{type(error).__name__}: {error}"
    if told.failed or told.error:
        told.error += f"\n    {sizes}"
    return told


def files(family: str, seed: int, sizes: dict[str, Any], place: Path) -> Iterator[Path]:
    """Write the folder, and a GGUF twin if llama.cpp can express the model."""
    from builders.families import random_folder, twin

    from llorch.families.llamacpp_limits import cannot_express
    from llorch.files import open_weights

    folder = random_folder(family, place / "folder", seed, **sizes)
    yield folder
    if not cannot_express(open_weights(folder).config):
        yield twin(folder, place / "twin.gguf")


def judge(path: Path, told: Judged, with_torch: bool) -> None:
    """Judge one file; the float64 reference and at least one engine must run."""
    from llorch.files import open_weights
    from llorch.judging.verify import plan_live, verify_live
    from llorch.stages.comparison import FAIL, TIE

    rng, weights = np.random.default_rng(told.seed), open_weights(path)
    plan = plan_live(weights, rng.integers(3, weights.config.vocab_size, rng.integers(2, 90)).tolist(), ENGINES)
    rows = list(verify_live(plan, runners if with_torch else numpy_only, failed=(unable := {})))
    told.rows += len(rows)
    for name in (*ENGINES, "transformers-float64"):
        told.judges[name] += any(row.producer == name for row in rows)
    told.ties += sum(row.verdict == TIE for row in rows)
    told.failed += [
        f"{path.name} {row.backend} {row.producer} {row.stage} {row.mode} {row.note}"
        for row in rows
        if row.verdict == FAIL
    ]
    if not any(row.producer == "transformers-float64" for row in rows):
        told.failed.append(f"{path.name}: nobody judged it: {unable}")


def numpy_only(weights: Any, *, wide: bool) -> Iterator[Any]:
    """Yield the runners of the NumPy path."""
    from llorch.judging.runners.numpy import numpy_runners

    return numpy_runners(weights, wide=wide)


def runners(weights: Any, *, wide: bool) -> Iterator[Any]:
    """Yield the runners of NumPy and of torch: as written, and with its fastest parts in a batch with others."""
    from llorch.judging.runners.torch import torch_runners
    from llorch.pytorch.device import target

    yield from numpy_only(weights, wide=wide)
    for dtype in ("float64", "float32"):
        yield from torch_runners(target("cpu", dtype), only=("", "-fast-batch"))(weights, wide=wide)


if __name__ == "__main__":
    main()
