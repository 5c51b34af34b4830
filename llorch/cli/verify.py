"""`llorch verify`: every checkpoint against goldens or live engines."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from llorch.cli.dumped import map_option
from llorch.cli.mesh import mesh_option, on_mesh, timeout_option
from llorch.cli.options import (
    ENGINES,
    MODEL,
    TEXT,
    backend_options,
    json_option,
    numerics_options,
    refuse_both,
    threads_option,
    tokens_option,
    verb,
)

GOLDEN = "golden"


class Witness(click.ParamType):
    """What to compare with: goldens, an engine, or the path of a dump."""

    name = "|".join((GOLDEN, *ENGINES, "dump"))

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """A word as it is, else a path of something that is there."""
        if value in (GOLDEN, *ENGINES) or not isinstance(value, str):
            return value
        if not Path(value).exists():
            self.fail(f"expected {', '.join((GOLDEN, *ENGINES))} or a dump, got {value!r}", param, ctx)
        return Path(value)


@verb(
    "Compare every stage with llama.cpp and transformers.",
    "llorch verify                                    all built-in models",
    "llorch verify micro-llama --detail               stage by stage",
    "llorch verify micro-qwen3 --against llamacpp     with the engine itself",
    'llorch verify model.gguf --prompt "Once upon a time, a small fox found a stone"',
    "llorch verify model.gguf                         if quantised: as llama.cpp computes it",
    "llorch verify path/to/huggingface-folder --tokens 1,22,333,44,5,66,777,8",
    "llorch verify story --backend torch              the torch path: float64, float32, bfloat16",
    "llorch verify model.gguf --against path/to/dump  with what another engine wrote down",
    "llorch verify micro-llama --mesh dp=2,tp=2       the torch path and training, split over four processes",
    "llorch verify --device cuda --dtype bfloat16",
    "llorch verify --device cuda --kernels own        our kernels, too: each beside torch's on this very device",
)
@click.argument("models", type=MODEL, nargs=-1, metavar="[MODEL]...")
@click.option(
    "--against", multiple=True, type=Witness(), help="What to compare with; may be repeated. A dump goes alone."
)
@map_option
@click.option("--prompt", type=TEXT, help="Text to run, with live engines.")
@tokens_option("Token ids to run, with live engines; for models without a vocabulary.")
@numerics_options
@backend_options
@mesh_option
@timeout_option
@threads_option
@json_option("One object {version, rows, summary}; NaN and infinity become null.")
@click.option("--strict", is_flag=True, help="A near-tie (TIE) fails, too.")
@click.option("--detail", is_flag=True, help="A line per stage instead of one per checkpoint.")
def command(
    *, models: tuple[str, ...], against: tuple[Any, ...], mapping: Path | None, prompt: str | None,
    tokens: list[int] | None, numerics: str | None, kv_cache: str, residency: Any, backend: str, device: str | None,
    dtype: str | None, kernels: Any, axes: Mapping[str, int] | None, rank_timeout: float, as_json: bool, strict: bool,
    detail: bool,
) -> None:  # fmt: skip
    """Compare our forward pass with two engines that someone else wrote.

    In float64 ours is compared with the truth, which transformers computes in pure float64, at 1e-12; in float32 with
    both engines. Every stage of every layer is judged alone (fed the golden's input) and chained, near position 0 and
    thousands of positions on; then decoding with the cache, logits, sampling and generation. Of micro-llama and
    micro-qwen3 training is judged too: what an adapter adds, loss, gradients, optimizer steps, a loss curve, and the
    files that others load.

    A built-in model is compared with stored goldens. For a .gguf file or a Hugging Face folder both engines run now;
    they come with pip install 'llorch[golden]'. A quantised, F16 or BF16 .gguf file is compared with llama.cpp running
    that very file, its rounding of inputs emulated (--numerics ggml); with --numerics exact each engine decodes it. A
    line above a table says what an engine did not read in the file by itself; in --json every row has it as `route`.

    With --backend torch the torch modules are judged on one device, in float64, float32 and bfloat16, or in --dtype:
    as they are written, with their fastest parts, reproducible, and in a batch with padding. Limits of half
    precision are derived with its steps. Devices that nothing ran on are printed as NOT RUN. With --kernels own each
    of our kernels is first compared with what torch has in its place, on that device.

    With --mesh dp=N,tp=M the torch modules are split over M processes, and each stage is judged as all of them have it
    together; training runs on N times M, which also share the rows of a batch and the parameters. A model with
    other layers than dense ones and experts, or whose heads M does not divide, is refused; where no model is given it
    is left out and named.

    Another token than the golden's is a TIE only where the float64 truth holds both so near to each other that rounding
    moves one past the other, and a token more or less in top-p only where float32 sums may put it on either side of p.

    A dump (see llorch diagnose) is compared as an engine is, alone (fed its own inputs) and chained, with limits of the
    arithmetic that it declares or shows. Which mistake a failure is llorch diagnose says.

    Exit code 1: numbers differ, or with --strict there is a TIE. 3: an engine, a golden or the device is missing, or an
    engine shows NaN where the truth has a number. A NOT RUN line gives 3 where its engine, golden, checkpoint or device
    was asked for; a device or backend that nobody asked for is listed and leaves the code as it is.
    """
    refuse_both(prompt, tokens)
    dumps = [each for each in against if isinstance(each, Path)]
    if (dumps or GOLDEN in against) and len(against) > 1:
        raise click.UsageError("--against golden, or a dump, goes alone; give it, or engines")
    if mapping is not None and not dumps:
        raise click.UsageError("--map goes with a dump: --against path/to/dump")
    from llorch.cli.judging import Arithmetic, judge_all

    if axes is not None and (dumps or device or kernels != "auto"):
        raise click.UsageError("--mesh runs the page as it is written, on the CPU: no --device, --kernels or dump")
    given: Any = {"prompt": prompt, "tokens": tokens, "as_json": as_json, "detail": detail}
    with on_mesh(axes, rank_timeout=rank_timeout) as mesh:
        where = "torch" if mesh else backend
        arithmetic = Arithmetic(numerics, kv_cache, residency, where, device, dtype, kernels, mesh)
        if dumps:
            from llorch.cli.against import judge_dump

            code = judge_dump(models, dumps[0], mapping, arithmetic, **given)
        else:
            code = judge_all(models, against, arithmetic, strict=strict, **given)
    raise click.exceptions.Exit(code)
