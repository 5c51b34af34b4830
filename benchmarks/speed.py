"""Speed and memory of llorch beside llama.cpp, transformers and PEFT, each case with one form of results.

    python benchmarks/speed.py decode                       Qwen2.5-0.5B shape, random weights, six types
    python benchmarks/speed.py decode --type Q4_0 --layers 2 --rounds 1
    python benchmarks/speed.py decode --model model.gguf --variant numpy --variant torch,dtype=bfloat16,kernels=own
    python benchmarks/speed.py open --model model.gguf --json benchmarks/results/open.json
    python benchmarks/speed.py tables                       write the tables of README.md from benchmarks/results

Engines run in their defaults, each in a process of its own, in interleaved rounds. Values are medians, ratios are
medians of the ratios of single rounds. Exit code 3: something did not run, and the reason is printed.
"""

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from speed_cases import tables as pages
from speed_cases.decode import Setup, read_variant
from speed_cases.folders import KINDS
from speed_cases.models import FILE_TYPES, SHAPES
from speed_cases.rounds import Results, machine

HERE = Path(__file__).resolve().parent

DEVICE = click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True)
SERVERS = ("torch", "torch, reproducible", "numpy", "llama.cpp")
PART_OF_MODEL = ("types", "model", "shape", "layers", "vocabulary", "variants", "reference", "beside")
Function = Callable[..., Any]
option = functools.partial(click.option, show_default=True)


@click.group(
    help=(__doc__ or "").replace("\n\n    ", "\n\n\b\n    "), context_settings={"help_option_names": ["-h", "--help"]}
)
def main() -> None:
    """Entry point."""


def case(*types: str, rounds: int = 5, threads: int | None = 2) -> Callable[[Function], click.Command]:
    """Make a case of a function that fills `Results`; with `types` it also gets a `Setup` of models."""

    def decorate(function: Function) -> click.Command:
        def command(output: Path | None, busy: bool, **values: Any) -> None:
            unused = ("types", "shape") if values.get("model") else ()
            settings = {name: value for name, value in values.items() if value and name not in unused}
            if types:
                values["setup"] = Setup(
                    **{name: values.pop(name) for name in PART_OF_MODEL}, threads=values.pop("threads"),
                    rounds=values.pop("rounds"), batch=values.pop("batch", 1),
                )  # fmt: skip
            results = Results()
            with busy_core(busy):
                function(results, **values)
            finish(function.__name__, results, settings | ({"busy": True} if busy else {}), output)

        name = function.__name__
        text = docstring(HERE / "speed_cases" / f"{name if name != 'prefill' else 'decode'}.py")
        command.__click_params__ = [*getattr(function, "__click_params__", [])]  # type: ignore[attr-defined]
        for add_option in (*options(rounds, threads), *(model_options(types) if types else ())):
            command = add_option(command)
        return main.command(name, help=text)(command)

    return decorate


def docstring(path: Path) -> str:
    """Read the docstring of a module without importing it."""
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def options(rounds: int, threads: int | None) -> list[Function]:
    """List the options of all cases."""
    return [
        option("--json", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write the results here."),
        option("--busy", is_flag=True, help="Another program keeps one core busy."),
        option("--rounds", default=rounds, type=click.IntRange(1), help="Measured rounds."),
        option("--threads", default=threads, type=click.IntRange(1), help="Threads of each engine."),
    ]


def model_options(types: tuple[str, ...]) -> list[Function]:
    """List the options of cases that measure models."""
    kinds, folder = click.Choice([*FILE_TYPES, *KINDS]), click.Path(exists=True, file_okay=False, path_type=Path)
    return [
        option("--beside", type=folder, help="Checkout of another llorch to compare with."),
        option("--reference", callback=checked, help="Variant to compare the others with."),
        option("--variant", "variants", multiple=True, callback=checked, help="llorch's options; see above."),
        option("--vocabulary", type=click.IntRange(2048), help="Tokens that the random model knows."),
        option("--layers", type=click.IntRange(1), help="Layers of the random model."),
        option("--shape", type=click.Choice(list(SHAPES)), default="dense", help="Shape of the random model."),
        option("--model", type=click.Path(exists=True, path_type=Path), help="A published file or folder instead."),
        option("--type", "types", type=kinds, multiple=True, default=types, help="Types of the random weights."),
    ]


def checked(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
    """Refuse a variant that cannot be read."""
    for text in value if isinstance(value, tuple) else filter(None, [value]):
        read_variant(text)
    return value


@contextmanager
def busy_core(is_busy: bool) -> Iterator[None]:
    """Run another program that never waits, while the body runs."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if is_busy else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def finish(name: str, results: Results, settings: dict[str, Any], output: Path | None) -> None:
    """Print the table, write the file, and exit with 3 if something did not run."""
    names = {key: value.name if isinstance(value, Path) else value for key, value in settings.items()}
    report = {"machine": machine(), "case": name, "settings": names, "rows": results.rows, "not_run": results.not_run}
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n")
    if results.rows:
        print(pages.text_of(json.loads(json.dumps(report))))
    sys.exit(3 if results.not_run else 0)


@case("F32", "BF16", "F16", "Q8_0", "Q4_0", "Q4_K_M")
@option("--prompt", default=128, type=click.IntRange(1), help="Tokens before the first decoded one.")
@option("--decode", "n_decode", default=24, type=click.IntRange(1), help="Tokens decoded in a round.")
@option("--batch", default=1, type=click.IntRange(1), help="Equal prompts at once, on torch only.")
def decode(results: Results, setup: Setup, prompt: int, n_decode: int) -> None:
    """Time decoding."""
    import_module("speed_cases.decode").run(setup, results, "decode", [prompt], n_decode)


@case("F32", "BF16", "F16", "Q8_0", "Q4_0", "Q4_K_M")
@option("--prompt", "prompts", multiple=True, default=[128, 512], type=click.IntRange(1), help="Tokens of a prompt.")
@option("--batch", default=1, type=click.IntRange(1), help="Equal prompts at once, on torch only.")
def prefill(results: Results, setup: Setup, prompts: tuple[int, ...]) -> None:
    """Time prompts."""
    import_module("speed_cases.decode").run(setup, results, "prefill", prompts, 0)


@case("Q4_K_M")
def open(results: Results, setup: Setup) -> None:
    """Time opening."""
    import_module("speed_cases.open").run(setup, results)


@case("F32")
@option("--dtype", "dtypes", multiple=True, default=["float32", "bfloat16"])
@option("--rows", default=2, type=click.IntRange(1), help="Of a step.")
@option("--tokens", default=128, type=click.IntRange(2), help="In each row.")
@option("--modules", default="q_proj,v_proj", help="Adapted matrices.")
@DEVICE
def train(results: Results, modules: str, **values: Any) -> None:
    """Time and weigh training steps."""
    import_module("speed_cases.train").run(results=results, modules=modules.split(","), **values)


@case(rounds=3)
@option("--shape", type=click.Choice(["story", "0.5B"]), default="story")
@option("--server", "names", multiple=True, type=click.Choice(SERVERS), default=SERVERS)
@option("--clients", multiple=True, default=[1, 4, 16], type=click.IntRange(1))
@option("--words", default=48, type=click.IntRange(1), help="Of each prompt.")
@option("--tokens", default=64, type=click.IntRange(1), help="Of each answer, at most.")
def serve(results: Results, **values: Any) -> None:
    """Time servers."""
    import_module("speed_cases.serve").run(results, **values)


@case("BF16", rounds=3, threads=None)
@option("--command", "commands", multiple=True, help="Words after llorch.")
def verify(results: Results, setup: Setup, commands: tuple[str, ...]) -> None:
    """Time commands."""
    import_module("speed_cases.verify").run(setup, results, commands)


@case(rounds=3, threads=1)
@option("--shape", type=click.Choice(["qwen2.5-0.5b", "llama-3.2-1b", "llama-3-8b"]), default="qwen2.5-0.5b")
@option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16")
@option("--rows", default=4, type=click.IntRange(1), help="Of a forward pass, on all ranks together.")
@option("--tokens", default=64, type=click.IntRange(2), help="In each row.")
@option("--gradient-checkpointing", "recomputed", is_flag=True)
@option("--paper", is_flag=True, help="Only print what needs no measurement: 8B, on paper to 1024 GPUs.")
@DEVICE
def mesh(results: Results, paper: bool, **values: Any) -> None:
    """Weigh ranks, or print the paper."""
    module = import_module("speed_cases.mesh")
    if paper:
        print(module.paper())
    else:
        module.run(results, **values)


@case()
@option("--shape", "names", multiple=True, type=click.Choice(["llama-2-7b", "llama-3-8b"]), default=["llama-3-8b"])
@option("--part", type=click.Choice(["models", "products"]), default="models")
@option("--kind", "kinds", multiple=True, help="Kinds of matrices for single products.  [default: all]")
def cuda(results: Results, part: str, names: tuple[str, ...], kinds: tuple[str, ...], **_: Any) -> None:
    """Time a CUDA device."""
    import_module("speed_cases.cuda").run(results, part, names, kinds)


@main.command(help=pages.__doc__)
def tables() -> None:
    """Write the page."""
    page = HERE / "README.md"
    page.write_text(pages.fill(page.read_text(), HERE / "results"))


if __name__ == "__main__":
    main()
