"""Cases `decode` and `prefill`: tokens per second of llorch, llama.cpp and transformers on the same weights.

llorch's combinations are its own options: `numpy`, `torch,dtype=bfloat16`, `numpy,numerics=ggml,kernels=ggml`. One
that llorch refuses is NOT RUN, with the reason.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from llorch.runtime.errors import EngineDied

from .models import Models, bytes_per_token, random_models
from .rounds import Action, Engine, Results, interleave_loaded

FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
FOR_FLOATS = {
    "F32": ("numpy", "torch,dtype=float32"),
    "BF16": ("numpy", "torch,dtype=bfloat16", "torch,dtype=float32"),
    "F16": ("numpy", "torch,dtype=float16", "torch,dtype=float32"),
}
FOR_BLOCKS = ("numpy", "torch,dtype=float32", "torch,dtype=bfloat16", "numpy,numerics=ggml,kernels=ggml")
FOR_FOLDERS = ("torch,dtype=float32",)
PLAIN = {"use_extra_bufts": False}  # llama.cpp's repacked layouts end by SIGSEGV on some processors with AMX


@dataclass(frozen=True)
class Setup:
    """Models and engines of a run."""

    types: Sequence[str]
    model: Path | None
    shape: str
    layers: int | None
    vocabulary: int | None
    variants: Sequence[str]
    reference: str | None
    beside: Path | None
    threads: Any  # None: llorch's own number, in case `verify`
    rounds: int
    batch: int = 1

    @contextmanager
    def models(self) -> Iterator[Models | None]:
        """Make the random models, or nothing for a published one."""
        if self.model is not None:
            yield None
            return
        sizes = {"num_hidden_layers": self.layers, "vocab_size": self.vocabulary}
        with random_models(self.shape, self.threads or 1, **sizes) as models:
            yield models

    @property
    def kinds(self) -> Sequence[str]:
        """Types to measure, or the name of the published file."""
        return self.types if self.model is None else [self.model.name]


def run(setup: Setup, results: Results, part: str, prompts: Sequence[int], n_decode: int) -> None:
    """Measure every type, with all of its engines in the same rounds."""
    room = max(1024, max(prompts) + n_decode)
    actions = actions_of(part, prompts, n_decode, setup.batch)
    units = {what: "tokens/s" for *_, values in actions for what in values} | {"read": "GB/s"}
    with setup.models() as models, tempfile.TemporaryDirectory() as work:
        for kind in setup.kinds:
            results.model = kind
            try:
                path = model_path(setup, models, kind)
                engines = engines_of(setup, models, kind, path, room)
            except (ChildProcessError, EngineDied) as error:  # of llama.cpp's quantiser
                results.skip("", error)
                continue
            engines += [memory_loop(work)] if part == "decode" else []
            ran, samples = interleave_loaded(engines, actions, setup.rounds, setup.threads, results)
            n_bytes = bytes_per_token(path) if part == "decode" and setup.batch == 1 else 0
            results.add(ran, samples, units, n_bytes)


def actions_of(part: str, prompts: Sequence[int], n_decode: int, batch: int) -> list[Action]:
    """List the calls of a round."""

    def rate(n_tokens: int) -> Any:
        return lambda answer: batch * n_tokens / answer["seconds"]

    ids = [list(range(1000, 1000 + n_tokens)) for n_tokens in prompts]
    if part == "prefill":
        return [("prefill", [row], {f"prefill {len(row)}": rate(len(row))}) for row in ids]
    more = list(range(2000, 2000 + n_decode))
    return [("prefill", [ids[0]], {}), ("decode", [more], {"decode": rate(n_decode)})]


def memory_loop(folder: str) -> Engine:
    """Describe the loop that reads memory in the same rounds as the engines."""
    from llorch.ops.compiled.library import find_compiler

    command = find_compiler()
    name = "NumPy's sum" if command is None else f"a loop in C, compiled by {Path(command[0]).name}"
    read: Action = ("read", [], {"read": lambda answer: answer["value"] / answer["seconds"] / 1e9})
    options = {"compiler": command or []}
    return Engine("memory", "Memory", folder, options, actions=(read,), note=f"the memory is read by {name}")


def model_path(setup: Setup, models: Models | None, kind: str) -> Path:
    """Find the file or folder of a type."""
    if models is None:
        assert setup.model is not None
        return setup.model
    return models.of(kind)


def engines_of(setup: Setup, models: Models | None, kind: str, path: Path, room: int) -> list[Engine]:
    """List the engines of a type; a quantised folder is measured beside a file of as many bits."""
    from .folders import EIGHT_BITS, KINDS

    is_folder = kind in KINDS
    defaults = FOR_FLOATS.get(kind, FOR_FOLDERS if is_folder else FOR_BLOCKS)
    engines = [llorch(text, path, setup, room) for text in setup.variants or defaults]
    if setup.beside is not None:
        other = f"llorch in {setup.beside.name}"
        engines += [
            replace(engine, name=other, root=setup.beside.resolve(), reference=True, of_variant=engine.variant)
            for engine in engines
        ]
    if setup.batch > 1:
        return engines
    gguf, name = path, "llama.cpp"
    if models is not None and is_folder and kind != "float":
        file_type = "Q8_0" if kind in EIGHT_BITS else "Q4_0"
        gguf, name = models.of(file_type), f"llama.cpp {file_type}"
        engines.append(replace(llorch(defaults[0], gguf, setup, room), name=f"llorch {file_type}", reference=True))
    if gguf.suffix == ".gguf":
        engines.append(Engine(name, "LlamaCpp", str(gguf), {"room": room}, fallback=PLAIN, reference=True))
    if models is not None and kind in FLOATS and (models.folder / "model.safetensors").exists():
        options = {"room": room, "dtype": FLOATS[kind]}
        engines.append(Engine("transformers", "Transformers", str(models.folder), options, reference=True))
    return engines


def llorch(text: str, path: Path, setup: Setup, room: int) -> Engine:
    """Read a combination such as `torch,dtype=bfloat16`; its words are options of `llorch.load` or `load_torch`."""
    backend, options = read_variant(text)
    if backend == "torch":
        options["batch"] = setup.batch
    kind = {"numpy": "NumPy", "torch": "Torch"}[backend]
    return Engine(kind=kind, path=str(path), options=options | {"room": room}, **title(text, setup))


def title(text: str, setup: Setup) -> dict[str, Any]:
    """Name llorch's engine: with the combination in its name if the others are compared with it."""
    if setup.reference == text:
        return {"name": f"llorch {text}", "reference": True}
    return {"name": "llorch", "variant": text}


def read_variant(text: str) -> tuple[str, dict[str, Any]]:
    """Split `torch,dtype=bfloat16` into the backend and its options; raise click.BadParameter for another form."""
    backend, *words = text.split(",")
    pairs = [word.partition("=") for word in words]
    if backend not in ("numpy", "torch") or not all(name and value for name, _, value in pairs):
        raise click.BadParameter(f"expected numpy or torch, then option=value, all with commas between; got {text!r}")
    return backend, {name: read_value(value) for name, _, value in pairs}


def read_value(text: str) -> Any:
    """Read true, false and numbers; other texts stay texts."""
    try:
        return json.loads(text)
    except ValueError:
        return text
