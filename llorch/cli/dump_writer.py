"""`llorch dump-writer`: print the source of a dump writer, to be copied into an engine."""

import click

from llorch.cli.options import verb

WRITERS = {
    "python": "dump_writer.py", "c": "llorch_dump.h", "rust": "llorch_dump.rs", "ggml": "llorch_dump_ggml.cpp",
}  # fmt: skip


@verb(
    "Print source code that dumps tensors of your engine.",
    "llorch dump-writer c > llorch_dump.h",
    "llorch dump-writer python > dump_writer.py",
    "llorch dump-writer ggml > dump_callback.cpp",
    page="dump-writer.md",
)
@click.argument("language", type=click.Choice(tuple(WRITERS)))
def command(*, language: str) -> None:
    """Print a source file of under 60 lines that writes a dump for llorch diagnose.

    Its first lines explain its use. The file of ggml is an eval callback in C++, for llama.cpp and other ggml engines.

    \b
    In another language, write raw little-endian arrays and an index.jsonl:
    {"llorch_dump": 1}
    {"pass": 0, "ids": [9, 4, 7], "first_position": 0}
    {"name": "q", "layer": 0, "dtype": "f32", "shape": [3, 64], "file": "q.bin"}
    """  # noqa: D301
    from importlib.resources import files

    text = files("llorch.engines.dumps.writers").joinpath(WRITERS[language]).read_text(encoding="utf-8")
    click.echo(text, nl=False)
