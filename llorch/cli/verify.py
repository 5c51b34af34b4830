"""`llorch verify`: compare every checkpoint with goldens or live engines."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from llorch.cli.dump_input import map_option
from llorch.cli.mesh import mesh_option, on_mesh, timeout_option
from llorch.cli.model_options import ModelOptions, backend_group, numerics_group
from llorch.cli.options import (
    ENGINES,
    FILE,
    MODEL,
    PATH,
    TEXT,
    group,
    json_option,
    page_option,
    refuse_both,
    tokens_option,
    verb,
)
from llorch.cli.threads import threads_option

GOLDEN = "golden"


class ReferenceChoice(click.ParamType):
    """Parameter type of `--against`: goldens, an engine, or the path of a dump."""

    name = "|".join((GOLDEN, *ENGINES, "DUMP"))

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Spell the words in lower case, as the user types them; click would print capitals."""
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
    'llorch verify model.gguf --prompt "Once upon a time, a fox found a stone"',
    "llorch verify model.gguf --source path/to/folder",
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
        "--against",
        multiple=True,
        type=ReferenceChoice(),
        help="Reference outputs; repeatable for engines.  [default: golden, or both engines]",
    ),
    group("Comparison", map_option),
    page_option("--strict", is_flag=True, help="Failure on a near-tie (TIE), too."),
    page_option(
        "--source",
        is_flag=False,
        flag_value="",
        metavar="[SOURCE]",
        help="Model that MODEL was made from, to compare files.  [without SOURCE: the one that MODEL names]",
    ),
    page_option("--adapter", type=PATH, help="Adapter that was merged into SOURCE."),
    page_option("--no-stages", is_flag=True, help="Only files, with --source."),
    page_option("--junit", type=FILE, help="JUnit XML file to write, with --source."),
)
@numerics_group("ggml against llama.cpp for a quantised, F16 or BF16 file, else exact")
@backend_group("float64, float32 and bfloat16")
@mesh_option
@timeout_option
@threads_option
@group(
    "Output",
    page_option("--detail", is_flag=True, help="One line per stage, not per checkpoint."),
    page_option("-v", "--verbose", is_flag=True, help="Tables of all models, also without MODEL."),
    json_option("One object {version, comparisons, summary}."),
)
def command(
    *, models: tuple[str, ...], against: tuple[Any, ...], mapping: Path | None, axes: Mapping[str, int] | None,
    rank_timeout: float, as_json: bool, strict: bool, detail: bool, verbose: bool, source: str | None,
    adapter: Path | None, no_stages: bool, junit: Path | None, **values: Any,
) -> None:  # fmt: skip
    """Check every stage of the forward pass against llama.cpp and transformers.

    MODEL is a file, a folder or a name (default: all built-in models, one line each). To check another engine, give
    its dump to llorch diagnose.

    Exit codes: 0 all pass, 1 numbers differ, 3 an engine, a golden or the device is missing; with --source 0 or 1.
    """
    refuse_both(values["prompt"], values["tokens"])
    dump = _find_dump(against, mapping)
    from llorch.cli.verify_plan import LiveInput, judge_all

    options = ModelOptions.from_values(values)
    if axes is not None:
        if dump or options.device or options.kernels != "auto":
            reason = "which runs the reference implementation on the CPU"
            raise click.UsageError(f"--device, --kernels and a dump do not go with --mesh, {reason}")
        options = replace(options, backend="torch")
    inputs, printing = LiveInput(**values), {"as_json": as_json, "detail": detail}
    if source is not None:
        if len(models) != 1 or against or axes is not None or options.backend != "numpy":
            raise click.UsageError("--source: expected one MODEL, without --against, --mesh and --backend")
        from llorch.cli.verify_source import SourceInput, verify_source

        names = SourceInput(models[0], source, adapter)
        code = verify_source(names, options, inputs, with_stages=not no_stages, strict=strict, junit=junit, **printing)
        raise click.exceptions.Exit(code)
    if adapter or no_stages or junit:
        raise click.UsageError("--adapter, --no-stages and --junit go with --source")
    with on_mesh(axes, rank_timeout=rank_timeout) as mesh:
        if dump is not None:
            from llorch.cli.verify_dump import judge_dump, plan_check

            code = judge_dump(plan_check(models, dump, mapping, options, inputs), **printing)
        else:
            code = judge_all(models, against, options, inputs, mesh, strict=strict, verbose=verbose, **printing)
    raise click.exceptions.Exit(code)


def _find_dump(against: tuple[Any, ...], mapping: Path | None) -> Path | None:
    """Return the dump of `--against`, if there is one; UsageError for options that contradict each other."""
    dumps = [reference for reference in against if isinstance(reference, Path)]
    if (dumps or GOLDEN in against) and len(against) > 1:
        raise click.UsageError(
            f"--against: expected golden alone, a dump alone, or engines, got {', '.join(map(str, against))}"
        )
    if mapping is not None and not dumps:
        raise click.UsageError("--map goes with a dump: --against path/to/dump")
    return dumps[0] if dumps else None
