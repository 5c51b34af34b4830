"""`llorch lora train`: train an adapter into a folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from llorch.cli.implementation import implementation_option, use_implementation_for_training
from llorch.cli.lora.options import require_torch, threads_for_training
from llorch.cli.lora.settings_options import chosen_settings, config_option, settings_options
from llorch.cli.mesh import mesh_option, on_mesh, timeout_option
from llorch.cli.options import MODEL, PATH, group, json_option, page_option, verb
from llorch.cli.output import say, to_json
from llorch.cli.threads import threads_option
from llorch.runtime.launched_rank import n_restarts
from llorch.training.settings_file import FOREIGN
from llorch.training.stopping import Stopped


@verb(
    "Train a LoRA adapter.",
    "llorch lora train story --data pirate -o path/to/my-adapter",
    "llorch lora train -o path/to/run --resume",
    "llorch lora train story --data pirate -o my-pirate --impl my_llama",
    page="lora.md",
    foreign=FOREIGN | {"output_dir": "use -o", "output_path": "use -o", "adapter_path": "use -o"},
    common=(
        "impl", "data", "max_length", "output", "config", "resume", "r", "alpha", "target_modules", "lr", "epochs",
        "steps", "batch_size", "accumulation", "seed", "device",
    ),
)  # fmt: skip
@click.argument("model", type=MODEL, required=False)
@implementation_option("Your own gradients and steps, in NumPy.")
@group("Data", page_option("--data", help="JSONL file, .json list, folder, pirate or pirate-chat."))
@group(
    "Run",
    page_option("-o", "--output", type=PATH, required=True, help="Folder of the run; new or empty."),
    config_option,
    page_option("--resume", is_flag=True, help="Continuation of the run in the folder."),
    page_option("--allow-change", is_flag=True, help="Continuation after a change; not bit-exact."),
)
@settings_options()
@threads_option
@mesh_option
@timeout_option
@json_option("One object at the end: steps, loss, valid_loss, seconds, n_parameters, adapter.")
def command(
    *, output: Path, config: Path | None, axes: Mapping[str, int] | None, rank_timeout: float, resume: bool,
    allow_change: bool, impl: str | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Train a LoRA adapter for MODEL and write it to a folder that PEFT can load.

    MODEL is a .gguf file, a Hugging Face folder or a built-in name. Ctrl-C saves and stops; --resume continues.
    Each setting can also be a key of the --config file.
    Try the adapter with: llorch run MODEL --adapter FOLDER
    """
    from llorch.cli.lora.training_progress import TrainingProgress, try_it

    require_torch()
    from llorch.pytorch.train.numpy_training import NumpyTraining
    from llorch.pytorch.train.run import RUN, Run, saved_settings, saved_threads
    from llorch.pytorch.train.trainer import Training

    resume = resume or (n_restarts() > 0 and (output / RUN).exists())  # launchers restart with the same arguments
    settings = chosen_settings(options, config, *([(RUN, saved_settings(output))] if resume else []))
    if axes is not None and impl is not None:
        raise click.UsageError("--impl trains in one process; leave out --mesh")
    try:
        with on_mesh(axes, rank_timeout=rank_timeout, device=settings.device) as mesh, TrainingProgress() as progress:
            threads_for_training(settings, recorded=saved_threads(output) if resume else None)
            use_implementation_for_training(impl)
            load_training = Training if impl is None else NumpyTraining
            result = Run(
                settings, output, progress, resume=resume, allow_change=allow_change, mesh=mesh,
                load_training=load_training,
            ).run()  # fmt: skip
    except Stopped as stopped:
        say(f"llorch: {stopped}")
        raise click.exceptions.Exit(stopped.exit_code) from None
    values = {name: getattr(result, name) for name in ("steps", "loss", "valid_loss", "seconds", "n_parameters")}
    if as_json:
        click.echo(to_json({**values, "adapter": str(output)}))
    else:
        _print_result(values)
        click.echo(f"{output}: adapter saved; try it with: {try_it(settings.model, settings.data, output)}")


def _print_result(values: dict[str, Any]) -> None:
    """Print the steps, losses, time and folder of a finished training run."""
    click.echo(f"{values['steps']} steps in {values['seconds']:.1f} s, loss {values['loss']:.4f}")
    if values["valid_loss"] is not None:
        first, best, last = (values["valid_loss"][name] for name in ("first", "best", "last"))
        best_at = f"; best {best[1]:.4f} at step {best[0]}" if best[0] != last[0] else ""
        click.echo(f"validation loss {first[1]:.4f} before, {last[1]:.4f} after{best_at}")
