"""`llorch trace`: write every stage of a run to a file or a folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from llorch.cli.options import ENGINES, MODEL, TEXT, WholeNumber, group, page_option, refuse_both, tokens_option, verb
from llorch.cli.output import progress, say
from llorch.cli.threads import threads_option, use_threads

SUFFIXES = (".safetensors", ".npz")
DUMP_FILES = {"index.jsonl", "data.bin"}


def _check_output_name(ctx: click.Context, param: click.Parameter, output: Path) -> Path:
    if output.suffix and output.suffix not in SUFFIXES:
        expectation = f"expected a name that ends in {' or '.join(SUFFIXES)}, or a folder name without an ending"
        raise click.BadParameter(f"{expectation}, got {output}")
    if output.is_dir() and (output.suffix or not {path.name for path in output.iterdir()} <= DUMP_FILES):
        raise click.BadParameter(
            f"{output} is a folder with other files, and llorch does not replace it; choose another name"
        )
    if not output.suffix and output.is_file():
        raise click.BadParameter(f"{output} is a file, and llorch does not replace it by a folder; choose another name")
    return output


@verb(
    "Write every stage of a run to a file.",
    'llorch trace story "There was a small red fox" -o story.safetensors',
    "llorch trace micro-llama --tokens 3,1,4,15 --first-position 4000 -o far.npz",
    "llorch trace micro-llama -o dump",
)
@click.argument("model", type=MODEL)
@click.argument("prompt", type=TEXT, required=False)
@group(
    "Input",
    tokens_option("Token ids in place of PROMPT."),
    page_option(
        "--first-position", type=WholeNumber(min=0), default=0, show_default=True, help="Position of the first token."
    ),
    page_option("--producer", "engine_name", type=click.Choice(ENGINES), help="Engine to run.  [default: llorch]"),
)
@group(
    "Output",
    page_option(
        "-o", "--output", required=True, type=click.Path(path_type=Path), callback=_check_output_name,
        help="A .safetensors or .npz file, or a folder; an old one is replaced.",
    ),
)  # fmt: skip
@threads_option
def command(
    *, model: str, prompt: str | None, output: Path, tokens: list[int] | None, first_position: int,
    engine_name: str | None,
) -> None:  # fmt: skip
    """Run MODEL on PROMPT and write the array of every stage, from embed and l0.attn_norm to logits.

    Arrays are float32; ids of selected experts are int64. A .safetensors file has token ids and engine as JSON text in
    its metadata, under the name llorch. In Python, llorch.compare(a, b) finds the first stage where two traces differ.
    """
    from llorch.cli.inputs import choose_ids, model_path
    from llorch.model.model import load

    refuse_both(prompt, tokens)
    path = model_path(model)
    _check_output_folder(output, path)
    loaded = load(path)
    threads = use_threads(loaded.config)
    ids, _ = choose_ids(loaded, prompt, tokens)
    with progress(f"running {engine_name or 'llorch'}"):
        arrays = _trace_stages(path, ids, first_position, engine_name)
    facts = {"engine": engine_name or "llorch", "first_position": first_position, "ids": ids, "model": model}
    (write if output.suffix else _write_folder)(output, arrays, facts)
    size = sum(array.nbytes for array in arrays.values()) / 1e6
    say(f"wrote {len(arrays)} stages of {len(ids)} tokens to {output} ({size:.1f} MB); {threads}")


def _check_output_folder(output: Path, model: Path) -> None:
    """Refuse before the work, not after it; never write into the folder of weights that are being read."""
    if not output.parent.is_dir():
        raise FileNotFoundError(f"{output}: the folder {output.parent} does not exist; make it first")
    if model.is_dir() and output.resolve().parent == model.resolve():
        raise click.UsageError(f"{output} is inside the model folder; write the trace to another folder")


def _trace_stages(path: Path, ids: list[int], first_position: int, engine_name: str | None) -> dict:
    """Trace the stages of some tokens, by llorch or by a reference engine."""
    from llorch.engines import open_engine
    from llorch.model.model import load

    if engine_name is None:
        trace: dict = {}
        load(path).forward(ids, trace=trace, first_position=first_position)
        return trace
    with open_engine(engine_name, path) as engine:  # type: ignore[arg-type] (click checked the choice)
        return engine.trace(ids, first_position=first_position)


def _write_folder(output: Path, arrays: dict, facts: Mapping[str, Any]) -> None:
    from llorch.engines.dumps.writers.dump_writer import DumpWriter
    from llorch.files.new_file import new_folder

    header = {"engine": facts["engine"], "dtype": "float32", "kv_cache": "float32"}
    with new_folder(output) as folder, DumpWriter(folder, **header) as dump:
        dump.begin(facts["ids"], facts["first_position"])
        for key, array in arrays.items():
            dump.add(key, array)


def write(output: Path, arrays: dict, facts: Mapping[str, Any]) -> None:
    """Write arrays to a .npz file, or with the facts of the run as metadata to a .safetensors file."""
    import numpy as np

    from llorch.files.new_file import new_file
    from llorch.files.safetensors import tensor_bytes

    with new_file(output) as temporary, temporary.open("wb") as file:
        if output.suffix == ".npz":
            np.savez(file, **arrays)
        else:
            file.writelines(tensor_bytes(arrays, metadata={"llorch": json.dumps(facts, sort_keys=True)}))
