"""`llorch dump-writer`: the source of a writer, to be copied into an engine."""

import click

from llorch.cli.options import verb

WRITERS = {
    "python": "dump_writer.py", "c": "llorch_dump.h", "rust": "llorch_dump.rs", "ggml": "llorch_dump_ggml.cpp",
}  # fmt: skip


@verb(
    "The source that writes tensors of your engine.",
    "llorch dump-writer c          llorch_dump.h",
    "llorch dump-writer rust       llorch_dump.rs",
    "llorch dump-writer python     dump_writer.py",
    "llorch dump-writer ggml       an eval callback in C++",
)
@click.argument("language", type=click.Choice(tuple(WRITERS)))
def command(*, language: str) -> None:
    """Print a source file of under 60 lines that writes what llorch diagnose reads; how to use it stands on its top.

    The last one is for llama.cpp and every other engine on ggml. Redirect it to a file: llorch dump-writer c > NAME.

    In another language write the same: a folder of raw little-endian arrays, and a line for each in index.jsonl.

    \b
    {"llorch_dump": 1}
    {"pass": 0, "ids": [9, 4, 7], "first_position": 0}
    {"name": "q", "layer": 0, "dtype": "f32", "shape": [3, 64], "file": "q.bin"}

    The first line may say engine, dtype, kv_cache, activations and flash_attention; a pass is a call of the forward; of
    an array may be said offset and strides in bytes, tokens (of the pass, from 0) or positions, axes, and op.
    """  # noqa: D301
    from importlib.resources import files

    text = files("llorch.dumps.writers").joinpath(WRITERS[language]).read_text(encoding="utf-8")
    click.echo(text, nl=False)
