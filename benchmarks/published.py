"""Published vocabularies, chat templates, a model and hub checkpoints, judged in one table.

    python tests/support/fetch_vocabularies.py DIR
    python tests/support/build_llama_tools.py DIR                    programs of llama.cpp, some minutes
    LLORCH_VOCABULARIES=DIR python benchmarks/published.py           a sample, minutes
    LLORCH_VOCABULARIES=DIR python benchmarks/published.py --full    100,000 strings a vocabulary, 200 prompts; hours
    LLORCH_VOCABULARIES=DIR python benchmarks/published.py --only texts --threads 1

llama.cpp judges ids of a GGUF file, the publisher's library judges ids of a folder, transformers judges texts of
templates. llama.cpp, transformers in float64, PEFT and the openai client judge SmolLM2. Give --threads 1 on a machine
that other programs keep busy: llama.cpp's threads wait for each other by spinning. Exit code 1: something is wrong. NOT
RUN is not wrong.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "benchmarks")]

from published_lines import Line, decoded, progress, smollm2  # noqa: E402

from llorch.runtime.threads import n_cores  # noqa: E402

Part = Callable[[], Iterator[Line]]
NAMES = (
    "vocabularies", "templates", "stages", "texts", "perplexity", "dtypes", "types", "folder", "parts", "lora",
    "served", "checkpoints",
)  # fmt: skip


@click.command(help=__doc__)
@click.option("--full", is_flag=True, help="Everything, not a sample.")
@click.option("--only", type=click.Choice(NAMES), multiple=True, help="Parts to run.")
@click.option("--threads", default=n_cores(), show_default="cores", help="Threads of each engine.")
@click.option("--json", "output", type=click.Path(path_type=Path), help="Write all lines here.")
def main(full: bool, only: tuple[str, ...], threads: int, output: Path | None) -> None:
    """Entry point."""
    if hasattr(os, "sched_setaffinity"):  # engines take a thread for each core
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-threads:])
    print("| what | judge | compared | wrong | note |\n|---|---|---|---|---|")
    lines, lines_by_part = [], parts(full, threads)
    for name in only or NAMES:
        progress(f"part {name}")
        for line in lines_by_part[name]():
            print(line, flush=True)
            lines.append(line)
    if output is not None:
        output.write_text(json.dumps({"full": full, "threads": threads, "lines": [line.as_json() for line in lines]}))
    sys.exit(1 if any(line.wrong for line in lines) else 0)


def parts(full: bool, n_threads: int) -> dict[str, Part]:
    """Return the function that makes the lines of each part; a part imports its engines when it starts."""
    import published_checkpoints as hub
    import published_files as files
    import published_texts as text
    import published_use as use
    import published_vocabulary as vocabulary

    n_windows = text.WINDOWS if full else 8
    return {
        "vocabularies": lambda: vocabulary.vocabularies(100_000 if full else 2_000),
        "templates": vocabulary.templates,
        "stages": lambda: text.stages("SmolLM2", smollm2()),
        "texts": lambda: text.texts("SmolLM2", decoded(), 200 if full else 10, n_threads),
        "perplexity": lambda: text.perplexities(n_windows, n_threads),
        "dtypes": lambda: text.dtypes(n_threads),
        "types": lambda: files.types(full, n_threads),
        "folder": lambda: files.folder(n_threads),
        "parts": files.parts,
        "lora": lambda: use.lora(n_threads),
        "served": lambda: use.served(n_threads),
        "checkpoints": lambda: hub.checkpoints(n_windows, n_threads),
    }


if __name__ == "__main__":
    main()
