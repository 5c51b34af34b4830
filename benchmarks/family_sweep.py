"""Random models of random sizes, each as Hugging Face folder and GGUF twin, judged live by every engine that can.

    python benchmarks/family_sweep.py --n 30                                         all families
    python benchmarks/family_sweep.py qwen3_moe llama4 --n 3 --torch float32         the torch path, too
    python benchmarks/family_sweep.py dense --n 50                                   Llama, Qwen2, Qwen3
    python benchmarks/family_sweep.py quantised --n 50                               the same, quantised by llama.cpp
    OPENBLAS_CORETYPE=Haswell python benchmarks/family_sweep.py dense                with other kernels

transformers writes the folder; the converter of llama.cpp its twin, unless a GGUF file cannot express the model:
LLORCH_LLAMACPP names the source tree, which tests/support/fetch_vocabularies.py gets. `dense` and `quantised` need no
converter: llorch writes their files, with weights from nearly linear to saturated attention. A seed names a model, so
that it can be judged again (`--seed 17 --n 1`). Judged is all that `llorch verify` judges of a file: every stage alone
and chained, near and far, a split prefill, the text token for token. A line for each model, then one for each family.
Exit code 1: a stage failed, or an engine did not run.
"""

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
from family_sizes import FAMILIES, Draw, Sizes

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
ENGINES: tuple[Literal["llamacpp", "transformers"], ...] = ("llamacpp", "transformers")
REFERENCE = "transformers-float64"
DENSE = ("dense", "quantised")
FILE_TYPES = {  # LLAMA_FTYPE_* of llama.h; where a row is no multiple of 256, llama.cpp takes a smaller block
    "F16": 1, "BF16": 32, "Q8_0": 7, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9,
    "Q2_K": 10, "Q3_K_M": 12, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30,
}  # fmt: skip


@dataclass
class ModelSummary:
    """Verdicts on one model."""

    family: str
    seed: int
    n_rows: int = 0
    judges: Counter[str] = field(default_factory=Counter)  # engine to the number of files that it judged
    n_twins: int = 0
    n_ties: int = 0
    farthest: float = 0.0  # error of a float64 run against the float64 reference
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Write one line, and one more for each of the first failures."""
        line = f"{self.family} {self.seed}: {self.n_rows} rows, {self.n_ties} ties, {len(self.failures)} failed, "
        line += f"judged by {', '.join(f'{name} {count}' for name, count in self.judges.items())}"
        return "\n    ".join([line, *self.failures[:5], *self.failures[5:][-1:]])


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("families", nargs=-1, type=click.Choice(list(FAMILIES)))
@click.option("--n", default=3, show_default=True, help="Models of each family.")
@click.option("--seed", default=0, show_default=True, help="The first model's.")
@click.option("--torch", "dtypes", multiple=True, help="Judge the torch path too, in this dtype; may be repeated.")
@click.option("--jobs", default=2, show_default=True, help="Models at a time.")
def main(families: tuple[str, ...], n: int, seed: int, dtypes: tuple[str, ...], jobs: int) -> None:
    """Entry point."""
    families = families or tuple(FAMILIES)
    if "LLORCH_LLAMACPP" not in os.environ and {*families} - {*DENSE}:
        raise click.UsageError("set LLORCH_LLAMACPP, see --help: llama.cpp's converter has to make the GGUF twins")
    start, summaries = time.perf_counter(), list[ModelSummary]()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        cases = [(name, seed + index, dtypes) for index in range(n) for name in families]
        for future in as_completed([pool.submit(judge_model, *case) for case in cases]):
            summaries.append(future.result())
            click.echo(summaries[-1])
    for name in families:
        click.echo(sum_up([summary for summary in summaries if summary.family == name]))
    click.echo(f"{time.perf_counter() - start:.0f} s, {jobs} at a time")
    sys.exit(any(summary.failures for summary in summaries))


def sum_up(summaries: Sequence[ModelSummary]) -> str:
    """Sum up one family in a line."""
    judges = sum((summary.judges for summary in summaries), Counter[str]())
    n_bad = sum(bool(summary.failures) for summary in summaries)
    farthest = max(summary.farthest for summary in summaries)
    return (
        f"{summaries[0].family:<12} {len(summaries)} models, {sum(summary.n_twins for summary in summaries)} twins: "
        f"{n_bad} failed; {sum(summary.n_rows for summary in summaries)} rows, "
        f"{sum(summary.n_ties for summary in summaries)} ties; files judged by "
        + ", ".join(f"{name} {count}" for name, count in judges.items())
        + (f"; float64 within {farthest:.1e} of the float64 reference" if farthest else "")
    )


def judge_model(family: str, seed: int, dtypes: Sequence[str]) -> ModelSummary:
    """Judge one model; an error becomes a failure of the summary, so that the other models continue."""
    summary, draw = ModelSummary(family, seed), Draw(seed)
    sizes = FAMILIES[family](draw)
    try:
        with tempfile.TemporaryDirectory(prefix="llorch-sweep-") as folder_name:
            for path in write_files(family, draw, sizes, Path(folder_name)):
                summary.n_twins += path.suffix == ".gguf"
                judge_file(path, summary, dtypes)
    except Exception as error:  # any fault of any engine belongs in the table
        summary.failures.append(f"{type(error).__name__}: {error}")
    if summary.failures:
        summary.failures.append(str(sizes))
    return summary


def write_files(family: str, draw: Draw, sizes: Sizes, parent: Path) -> Iterator[Path]:
    """Write the folder, and a GGUF twin if llama.cpp can express the model."""
    from builders.families import random_folder, twin

    from llorch.engines.process import in_child
    from llorch.families.llamacpp_limits import cannot_express
    from llorch.files import open_weights
    from llorch.files.convert import convert

    path = parent / "twin.gguf"
    if family in DENSE:
        write_dense(parent / "folder", draw.rng, sizes)
        convert(parent / "folder", path)
        if family == "quantised":
            kind = list(FILE_TYPES)[draw.seed % len(FILE_TYPES)]
            copy = parent / f"{kind}.gguf"
            in_child("llamacpp", path, "llorch.engines.f32_copy:write_by_llamacpp", path, copy, FILE_TYPES[kind])
            yield copy
        else:
            yield from (parent / "folder", path)
        return
    folder = random_folder(family, parent / "folder", draw.seed, **sizes)
    yield folder
    if not cannot_express(open_weights(folder).config):
        yield twin(folder, path)


def write_dense(folder: Path, rng: np.random.Generator, sizes: Sizes) -> None:
    """Write a Hugging Face folder with this configuration and random weights of a random size and dtype."""
    import torch
    from safetensors.torch import save_file

    from llorch.families.read_huggingface import config_from_huggingface
    from llorch.files.tensor_names import inventory

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(sizes))
    scale = 10 ** rng.uniform(-2, -0.7)  # from nearly linear to saturated attention
    tensors = {}
    for weight in inventory(config_from_huggingface(sizes, path=folder)).values():
        array = scale * rng.standard_normal(weight.shape, dtype=np.float32)
        tensors[weight.huggingface] = torch.from_numpy(1 + array if weight.name.endswith("norm") else array)
    dtype = torch.bfloat16 if rng.random() < 0.3 else torch.float32
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / "model.safetensors")


def judge_file(path: Path, summary: ModelSummary, dtypes: Sequence[str]) -> None:
    """Judge one file; the float64 reference and at least one engine must run, for a dense model all of them."""
    from llorch.files import open_weights
    from llorch.judging.verify import plan_live, verify_ggml, verify_live
    from llorch.model.model import load
    from llorch.ops.numerics import GGML
    from llorch.stages.comparison import FAIL, TIE

    seed, vocab_size, unsupported = summary.seed, open_weights(path).config.vocab_size, dict[str, str]()
    rng, is_dense = np.random.default_rng(seed), summary.family in DENSE
    ids = rng.integers(0, vocab_size, 12) if is_dense else rng.integers(3, vocab_size, rng.integers(2, 90))
    if summary.family == "quantised":
        numerics = replace(GGML, kv_cache="f16" if seed % 3 == 0 else "f32")
        model = load(path, numerics=numerics, residency="packed" if seed % 5 < 2 else "decoded")
        comparisons = list(verify_ggml(model, ids.tolist(), failed=unsupported))
    else:
        plan = plan_live(open_weights(path), ids.tolist(), ENGINES)
        comparisons = list(
            verify_live(plan, partial(runners, None if is_dense else ("", "-fast-batch"), dtypes), failed=unsupported)
        )
    summary.n_rows += len(comparisons)
    for name in (*ENGINES, REFERENCE):
        summary.judges[name] += any(row.engine == name for row in comparisons)
    summary.n_ties += sum(row.verdict == TIE for row in comparisons)
    errors = [row.difference.error for row in comparisons if row.engine == REFERENCE and row.mode != "exact"]
    summary.farthest = max([summary.farthest, *errors])
    summary.failures += [
        f"{path.name} {row.backend} {row.engine} {row.stage_ref.name} {row.mode} {row.note}"
        for row in comparisons
        if row.verdict == FAIL
    ]
    if unsupported if is_dense else not errors:
        summary.failures.append(f"{path.name}: not judged by {unsupported}")


def runners(
    variants: Sequence[str] | None, dtypes: Sequence[str], weights: Any, *, has_reference: bool
) -> Iterator[Any]:
    """Yield the runners of NumPy, and of torch in some dtypes."""
    from llorch.judging.runners.numpy import numpy_runners

    yield from numpy_runners(weights, has_reference=has_reference)
    for dtype in dtypes:
        from llorch.judging.runners.torch import torch_runners
        from llorch.pytorch.device import target

        yield from torch_runners(target("cpu", dtype), only=variants)(weights, has_reference=has_reference)


if __name__ == "__main__":
    main()
