"""`llorch bench`: measure speed, and its share of the speed that this machine can reach."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from llorch.cli.mesh import mesh_option, on_mesh, require_tensor_parallel, timeout_option
from llorch.cli.model_options import backend_options, residency_option
from llorch.cli.options import MODEL, WholeNumber, group, json_option, page_option, verb
from llorch.cli.output import progress, say, to_json
from llorch.cli.threads import threads_option, use_threads

if TYPE_CHECKING:
    from llorch.apps.bench.measure import Load, Subject, TimedEngine
    from llorch.apps.bench.torch import MeasuredModel
    from llorch.files.residency import Residency
    from llorch.pytorch.device import Kernels, Target
    from llorch.pytorch.distributed.launch import DeviceMesh

SHAPES = ("qwen2.5-0.5b", "llama-3.2-1b", "llama-2-7b", "llama-3-8b")  # names from real_shapes, which is slow to import
TYPES = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")


@dataclass(frozen=True)
class ModelChoice:
    """Options of the command line that choose the model."""

    model: str | None
    shape: str | None
    weights_type: str | None
    device: str | None
    dtype: str | None
    kernels: "Kernels | Literal['ggml']"
    residency: "Residency"
    compiled: bool


@verb(
    "Measure speed on this machine.",
    "llorch bench",
    "llorch bench model.gguf --backend torch --dtype bfloat16",
    "llorch bench --shape llama-3-8b --weights-type Q4_K --device cuda",
    page="bench.md",
)
@click.argument("model", type=MODEL, required=False)
@group(
    "Model",
    page_option("--shape", type=click.Choice(SHAPES), help="Shape of a model with random weights, in place of MODEL."),
    page_option("--weights-type", type=click.Choice(TYPES), help="Block type of the random matrices, with --shape."),
    residency_option,
)
@group(
    "Work",
    page_option("--prompt", type=WholeNumber(min=1), default=128, show_default=True, help="Tokens of a prompt."),
    page_option("--decode", type=WholeNumber(min=1), default=32, show_default=True, help="Tokens decoded after it."),
    page_option(
        "--rounds", type=WholeNumber(min=1), default=5, show_default=True, help="Rounds after one for warm-up."
    ),
    page_option("--batch", type=WholeNumber(min=1), default=1, show_default=True, help="Prompts at the same time."),
)
@backend_options
@mesh_option
@timeout_option
@group("Machine", page_option("--compile", "compiled", is_flag=True, help="Decoding through torch.compile, on torch."))
@threads_option
@json_option("One object with all figures.")
def command(
    *, prompt: int, decode: int, rounds: int, batch: int, backend: str, axes: Mapping[str, int] | None,
    rank_timeout: float, as_json: bool, **model_choice: Any,
) -> None:  # fmt: skip
    """Measure how fast MODEL (default: story) reads a prompt and writes text on this machine.

    The figures are tokens/s, bytes/s and operations/s, with the ceilings that the same run measures.
    """
    from llorch.apps.bench.measure import Load, describe, measure

    choice = ModelChoice(**model_choice)
    _refuse_misplaced(choice, "torch" if axes else backend)
    not_split = {"--device": choice.device not in (None, "cpu"), "--compile": choice.compiled, "--shape": choice.shape}
    require_tensor_parallel(axes, not_split)
    load = Load(prompt, decode, batch, rounds)
    with on_mesh(axes, rank_timeout=rank_timeout) as mesh, progress("bench") as report:
        report("loading")
        on_torch = mesh is not None or backend == "torch"
        engine, subject = _on_torch(choice, load, mesh) if on_torch else _on_numpy(choice, load)
        measurement = measure(engine, subject, load, report)
    click.echo(to_json(measurement) if as_json else "\n".join(describe(measurement)))


def _refuse_misplaced(choice: ModelChoice, backend: str) -> None:
    """Raise a usage error for options that contradict each other."""
    if choice.model is not None and choice.shape is not None:
        raise click.UsageError("give a MODEL or --shape, not both")
    if choice.weights_type is not None and choice.shape is None:
        raise click.UsageError("--weights-type goes with --shape; a model file names its types")
    if choice.shape is not None and choice.residency != "auto":
        raise click.UsageError("--weights goes with a MODEL; with --shape, use --weights-type")
    only_torch = {
        "--device": choice.device, "--dtype": choice.dtype, "--kernels": choice.kernels in ("torch", "own"),
        "--compile": choice.compiled, "--shape": choice.shape,
    }  # fmt: skip
    for option, value in only_torch.items():
        if value and backend == "numpy":
            raise click.UsageError(f"{option} goes with --backend torch")
    if choice.kernels == "ggml" and backend == "torch":
        raise click.UsageError("--kernels ggml goes with --backend numpy")


def _on_numpy(choice: ModelChoice, load: "Load") -> "tuple[TimedEngine, Subject]":
    """Load the model for the NumPy path; return the engine to time and the description of the model."""
    from llorch.apps.bench.measure import NumpyEngine, numpy_subject
    from llorch.cli.inputs import chosen_numerics, model_path
    from llorch.model.model import load as load_model

    arithmetic, n_tokens = chosen_numerics(None, "f32", choice.kernels), load.prompt + load.decode
    path = model_path(choice.model or "story")
    model = load_model(path, numerics=arithmetic, residency=choice.residency, n_tokens=n_tokens)
    load.require(model.config)
    use_threads(model.config)
    return NumpyEngine(model, load), numpy_subject(model)


def _on_torch(choice: ModelChoice, load: "Load", mesh: "DeviceMesh | None") -> "tuple[TimedEngine, Subject]":
    """Load the model for the torch path; return the engine to time and the description of the model."""
    from llorch.runtime.errors import MissingExtra

    try:
        import torch  # noqa: F401 (imported first, so that the error names it)
    except ModuleNotFoundError:
        raise MissingExtra("torch", "torch") from None
    from llorch.apps.bench.torch import ParallelEngine, TorchEngine, parallel_subject, torch_subject
    from llorch.pytorch.device import target

    assert choice.kernels != "ggml"  # a usage error
    model = _open_measured(
        choice, target(choice.device or "cpu", choice.dtype or "float32", choice.kernels), load, mesh
    )
    say(f"{model.name}: loaded, weights {model.weights}, {model.target}")
    use_threads(model.module.config)
    if mesh is not None:
        return ParallelEngine(model.module, model.target, load, mesh["tp"]), parallel_subject(model, mesh)
    engine = TorchEngine(model.module, model.target, load, compiled=choice.compiled)
    return engine, torch_subject(model.module, model.target, model.name, model.weights)


def _open_measured(choice: ModelChoice, target: "Target", load: "Load", mesh: "DeviceMesh | None") -> "MeasuredModel":
    """Open the chosen model for torch: random weights of a shape, a rank's part of a file, or a file."""
    from llorch.apps.bench.torch import opened, opened_on, random
    from llorch.cli.inputs import model_path

    if choice.shape is not None:
        return random(choice.shape, target, choice.weights_type, load, compiled=choice.compiled)
    path = model_path(choice.model or "story")
    if mesh is not None:
        return opened_on(mesh, path, target, choice.residency, load)
    return opened(path, target, choice.residency, load, compiled=choice.compiled)
