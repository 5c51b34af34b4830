"""`llorch completion`: print the script that a shell runs to complete llorch's verbs, options and models."""

import click
from click.shell_completion import get_completion_class

from llorch.cli.options import verb


@verb(
    "Print the completion script of your shell.",
    "source <(llorch completion bash)    # in ~/.bashrc",
    "source <(llorch completion zsh)     # in ~/.zshrc, after compinit",
    "llorch completion fish > ~/.config/fish/completions/llorch.fish",
)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def command(*, shell: str) -> None:
    """Print a script that makes your shell complete verbs, options, built-in models, files and folders of llorch.

    The script asks the installed llorch, so it stays right after an update.
    """
    completion_class = get_completion_class(shell)
    assert completion_class is not None  # click has these three
    root = click.get_current_context().find_root().command
    click.echo(completion_class(root, {}, "llorch", "_LLORCH_COMPLETE").source(), nl=False)
