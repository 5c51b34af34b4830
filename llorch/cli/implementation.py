"""`--impl` of the verbs that run or train a model: a learner's functions (of `llorch learn`) in place of llorch's."""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llorch.cli.options import group, page_option
from llorch.cli.output import say

if TYPE_CHECKING:
    from llorch.apps.learn.exercise import Exercise
    from llorch.cli.model_options import ModelOptions
    from llorch.ops.numerics import Numerics

OURS = "reference"  # value of --impl for llorch's own functions
IN_OTHER_THREADS = ("merge", "generate")  # a server encodes prompts in another thread, and has its own loop
_HELP = (
    "Your own functions, a folder or cmd:PROGRAM.  [default: LLORCH_IMPL, else impl of [tool.llorch] in pyproject.toml]"
)


def implementation_option(help: str = _HELP) -> Callable[[Callable], Callable]:
    """Make the option `--impl` below the heading of the model's options."""
    return group("Model", page_option("--impl", help=help))


def use_implementation(
    impl: str | None, path: Path, options: "ModelOptions", arithmetic: "Numerics", *, has_adapter: bool,
    excluded: Collection[str] = (),
) -> "tuple[ModelOptions, bool]":  # fmt: skip
    """Install the learner's functions for generation with the model at `path` until the command ends, if there are any.

    Print which functions are the learner's. `excluded` exercises stay llorch's. Return the options for opening the
    model, and True if its arithmetic must be exact.
    """
    from llorch.apps.learn.choice import chosen
    from llorch.apps.learn.lessons import exercises_of_run
    from llorch.files import open_weights
    from llorch.ops.numerics import EXACT

    is_exact = options.backend == "numpy" and arithmetic == EXACT and not has_adapter
    if impl not in (None, OURS) and not is_exact:
        raise click.UsageError("--impl goes with --backend numpy and exact numerics, without --adapter")
    if impl == OURS or not is_exact or (spec := chosen(impl)) is None:
        return options, impl == OURS
    exercises = exercises_of_run(open_weights(path).config)
    install(spec, [exercise for exercise in exercises if exercise.name not in excluded])
    return replace(options, residency="decoded"), True  # a learner's functions multiply arrays


def use_implementation_for_training(impl: str | None) -> None:
    """Install the learner's functions for training until the command ends; nothing for None and `OURS`."""
    from llorch.apps.learn.lessons import exercises_of_training

    if impl not in (None, OURS):
        install(impl, exercises_of_training())


def install(spec: str, exercises: "Collection[Exercise]") -> None:
    """Install the functions that the learner has written for these exercises until the command ends; print names."""
    from llorch.apps.learn.choice import opened

    learner = opened(spec)
    unwritten = learner.unwritten(exercises)
    yours = [exercise.name for exercise in exercises if exercise.name not in unwritten]
    say(f"{spec}: your functions: {', '.join(yours) or 'none'}; borrowed from llorch: {', '.join(unwritten) or 'none'}")
    click.get_current_context().with_resource(learner.installed(exercises, live=True))
