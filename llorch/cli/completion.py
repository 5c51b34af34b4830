"""`llorch completion`: what a shell runs to complete our verbs, options and models."""

import click
from click.shell_completion import get_completion_class

from llorch.cli.options import verb


@verb(
    "Completion of verbs, options and models for your shell.",
    "llorch completion bash    in ~/.bashrc: source <(llorch completion bash)",
    "llorch completion zsh     in ~/.zshrc, after compinit: source <(llorch completion zsh)",
    "llorch completion fish    > ~/.config/fish/completions/llorch.fish",
)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def command(*, shell: str) -> None:
    """Print the script that makes SHELL complete `llorch`: verbs, options, built-in models, files and folders.

    Written once, it goes on to fit: what completes is the llorch that is installed.
    """
    found = get_completion_class(shell)
    assert found is not None  # click has these three
    root = click.get_current_context().find_root().command
    click.echo(found(root, {}, "llorch", "_LLORCH_COMPLETE").source(), nl=False)
