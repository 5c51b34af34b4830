"""Options and requirements that the verbs on adapters share."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from llorch.cli.options import group, page_option
from llorch.cli.threads import use_threads
from llorch.runtime.errors import MissingExtra

if TYPE_CHECKING:
    from llorch.training.settings import TrainSettings

force_option = group("Output", page_option("--force", is_flag=True, help="Permission to replace TARGET."))
any_base_option = group(
    "Adapter", page_option("--any-base", is_flag=True, help="Permission for an adapter of another base.")
)


def require_torch() -> None:
    """Raise MissingExtra if torch is absent."""
    if find_spec("torch") is None:
        raise MissingExtra("train", "torch")


def threads_for_training(settings: "TrainSettings", *, recorded: int | None = None) -> str:
    """Choose the threads of a run on torch; see `use_threads`."""
    import torch  # noqa: F401 (loads the thread pools that `use_threads` limits)

    from llorch.cli.inputs import model_path
    from llorch.files import open_weights

    return use_threads(open_weights(model_path(settings.model)).config, recorded=recorded)
