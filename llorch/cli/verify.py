"""`llorch verify`: every checkpoint against goldens or live engines."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from llorch.cli.dump_input import map_option
from llorch.cli.mesh import mesh_option, on_mesh, timeout_option
from llorch.cli.options import (
    ENGINES,
    MODEL,
    TEXT,
    backend_group,
    group,
    json_option,
    numerics_group,
    page_option,
    refuse_both,
    threads_option,
    tokens_option,
    verb,
)

GOLDEN = "golden"


class ReferenceChoice(click.ParamType):
    """What to compare with: goldens, an engine, or the path of a dump."""

    name = "|".join((GOLDEN, *ENGINES, "DUMP"))

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Spell the words as they are read; click would write capitals."""
        return f"[{self.name}]"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """Return a word as it is, or the path of a file or folder that exists."""
        if value in (GOLDEN, *ENGINES) or not isinstance(value, str):
            return value
        if not Path(value).exists():
            self.fail(f"expected {', '.join((GOLDEN, *ENGINES))} or a dump, got {value!r}", param, ctx)
        return Path(value)


@verb(
    "Check every stage against llama.cpp and transformers.",
    "llorch verify micro-llama --detail",
    'llorch verify model.gguf --prompt "Once upon a time, a fox found a stone"',
    "llorch verify model.gguf --against path/to/dump",
    page="verify.md",
)
@click.argument("models", type=MODEL, nargs=-1, metavar="[MODEL]...")
@group(
    "Input",
    page_option("--prompt", type=TEXT, help="Text to run, with live engines."),
    tokens_option("Token ids, for a model without a vocabulary."),
)
@group(
    "Comparison",
    page_option(
        "--against", multiple=True, type=ReferenceChoice(),
        help="Reference outputs; repeatable for engines.  [default: golden for a built-in model, else both engines]",
    ),
    group("Comparison", map_option),
    page_option("--strict", is_flag=True, help="Failure on a near-tie (TIE), too."),
)  # fmt: skip
@numerics_group("ggml against llama.cpp for a quantised, F16 or BF16 file, else exact")
@backend_group("float64, float32 and bfloat16")
@mesh_option
@timeout_option
@threads_option
@group(
    "Output",
    page_option("--detail", is_flag=True, help="One line per stage, not per checkpoint."),
    page_option("-v", "--verbose", is_flag=True, help="Tables of all models, also without MODEL."),
    json_option("One object {version, comparisons, summary}; NaN and infinity become null."),
)
def command(
    *, models: tuple[str, ...], against: tuple[Any, ...], mapping: Path | None, prompt: str | None,
    tokens: list[int] | None, numerics: str | None, kv_cache: str, residency: Any, backend: str, device: str | None,
    dtype: str | None, kernels: Any, axes: Mapping[str, int] | None, rank_timeout: float, as_json: bool, strict: bool,
    detail: bool, verbose: bool,
) -> None:  # fmt: skip
    """Check every stage of the forward pass against llama.cpp and transformers.

    MODEL is a file, a folder or a name (default: all built-in models, one line each). To check another engine, give
    its dump to llorch diagnose.

    Exit codes: 0 all pass, 1 numbers differ, 3 an engine, a golden or the device is missing.
    """
    refuse_both(prompt, tokens)
    dumps = [each for each in against if isinstance(each, Path)]
    if (dumps or GOLDEN in against) and len(against) > 1:
        raise click.UsageError(
            f"--against: expected golden alone, a dump alone, or engines, got {', '.join(map(str, against))}"
        )
    if mapping is not None and not dumps:
        raise click.UsageError("--map goes with a dump: --against path/to/dump")
    from llorch.cli.verify_plan import DeclaredArithmetic, judge_all

    if axes is not None and (dumps or device or kernels != "auto"):
        raise click.UsageError(
            "--device, --kernels and a dump do not go with --mesh, which runs the reference implementation on the CPU"
        )
    given: Any = {"prompt": prompt, "tokens": tokens}
    shown: Any = {"as_json": as_json, "detail": detail}
    with on_mesh(axes, rank_timeout=rank_timeout) as mesh:
        where = "torch" if mesh else backend
        arithmetic = DeclaredArithmetic(numerics, kv_cache, residency, where, device, dtype, kernels, mesh)
        if dumps:
            from llorch.cli.verify_dump import judge_dump, plan_check

            code = judge_dump(plan_check(models, dumps[0], mapping, arithmetic, **given), **shown)
        else:
            code = judge_all(models, against, arithmetic, strict=strict, verbose=verbose, **given, **shown)
    raise click.exceptions.Exit(code)
