"""The command line: one module per verb, imported when the verb is used, each with its heavy imports inside.

Results go to stdout, everything else (progress, warnings, errors) to stderr; see `outcome` for exit codes.
"""

from importlib import import_module

import click

import llorch
from llorch.cli.outcome import reported

VERBS = ("run", "verify", "inspect", "tokenize", "trace", "convert", "quality", "bench")


class Verbs(click.Group):
    """The group of verbs; every module `llorch.cli.<verb>` holds its `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the verbs in the order of the help page."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one verb."""
        return import_module(f"llorch.cli.{cmd_name}").command if cmd_name in VERBS else None

    def invoke(self, ctx: click.Context) -> None:
        """Run the verb; an error becomes one line and an exit code."""
        with reported(traceback=ctx.params["traceback"]):
            super().invoke(ctx)


HELP = """\b
llorch run story "Once upon a time"      text at once, nothing to download
llorch verify                            every stage against llama.cpp and transformers
llorch inspect story                     what is in a file
llorch convert model.gguf folder         to Hugging Face, and back
llorch bench story                       speed, and the share of what the machine can do
echo "Once upon" | llorch run story -n 40

Llama and Qwen in NumPy, every step checked against two engines that someone else wrote.

\b
MODEL is a .gguf file, a Hugging Face folder, or a built-in name:
micro-llama, micro-llama3, micro-qwen2, micro-qwen3, story.

Any option may be set in the environment as LLORCH_<COMMAND>_<OPTION>.

\b
Exit codes: 0 ok, 1 numbers differ, 2 usage or unusable data,
3 something needed is missing, 4 out of memory, 70 a bug in llorch.
"""


@click.group(
    cls=Verbs,
    help=HELP,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "LLORCH"},
)
@click.version_option(llorch.__version__, package_name="llorch", message="%(prog)s %(version)s")
@click.option("--traceback", is_flag=True, help="Show where an error was raised; for bug reports.")
@click.pass_context
def main(ctx: click.Context, *, traceback: bool) -> None:
    """Print the help page when no verb is given."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
