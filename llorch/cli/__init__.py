"""Command line: one module per verb, imported when the verb is used, each with its heavy imports inside functions.

A verb is a command, such as `llorch run`. Results go to stdout, everything else (progress, warnings, errors) to stderr.
A verb checks which options go together, calls the package that does the work, and prints. The order to read:

    verbs, options    groups of verbs and their help pages; options that several verbs share, in `model_options` those
                      of a model and how it is opened, in `threads` the number of threads
    inputs            a MODEL, a prompt, ids, a conversation, as users write them
    outcome, output   turn exceptions into a line and an exit code; write output; `tables` prints tables
    run, tokenize, trace, dump_writer, convert, inspect (`contents`), bench, quality, data/, lora/,
    learn/            the verbs
    chat              `chat_session` is the conversation, `slash_commands` its commands
    diagnose, diff    values of other engines: `dump_input` reads them, `diagnose_table` prints the findings
    verify            `verify_plan` makes the comparisons (`on_torch` with torch), `verify_summary` counts them,
                      `report` prints them; `verify_dump` compares with a dump
"""

from textwrap import fill

import click

import llorch
from llorch.cli.outcome import reported
from llorch.cli.verbs import Verbs
from llorch.runtime.builtin import EVERY
from llorch.runtime.waiting import wait_asleep

VERBS = {
    "Port a model": ("verify", "diagnose", "diff", "dump-writer", "trace"), "Learn": ("learn",),
    "Fine-tune": ("lora", "data"), "Run and serve": ("run", "chat", "serve"),
    "Files": ("inspect", "convert", "tokenize", "quality"), "Machine": ("bench", "doctor", "completion"),
}  # fmt: skip


class Main(Verbs):
    """Group of all verbs; turns errors into exit codes."""

    def invoke(self, ctx: click.Context) -> None:
        """Run the verb; an error becomes one line and an exit code."""
        wait_asleep()
        with reported(traceback=ctx.params["traceback"]):
            super().invoke(ctx)


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Print version, commit and extras, and exit."""
    from llorch.apps.doctor.machine.packages import version_line

    if value and not ctx.resilient_parsing:
        click.echo(version_line(llorch.__version__))
        ctx.exit()


HELP = """Check your Llama or Qwen engine against llama.cpp and transformers; learn, fine-tune and serve such models.

\b
MODEL is a .gguf file, a Hugging Face folder, a model of its hub as
org/name[:QUANT][@REVISION], or a built-in name:
{names}.

Each option can be set in the environment as LLORCH_<COMMAND>_<OPTION>.

\b
Exit codes: 0 ok, 1 numbers differ, 2 usage or unusable data,
3 something needed is missing, 4 out of memory, 10 to 15 dumps that
cannot be compared (see llorch diagnose), 70 a bug in llorch,
74 a disk that is full, fails or cannot be written to.
""".replace("{names}", fill(", ".join(EVERY), 75, break_on_hyphens=False))


@click.group(
    cls=Main,
    package="llorch.cli",
    verbs=VERBS,
    help=HELP,
    examples=(
        'llorch run story "Once upon a time"     # nothing to download',
        "llorch diagnose dump --model story      # the first wrong stage of your engine",
        "llorch learn                            # build your own",
    ),
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "LLORCH"},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
    help="Version, commit and installed extras.",
)  # fmt: skip
@click.option("--traceback", is_flag=True, help="Python traceback of an error, for bug reports.")
@click.pass_context
def main(ctx: click.Context, *, traceback: bool) -> None:
    """Print the help page when no verb is given."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
