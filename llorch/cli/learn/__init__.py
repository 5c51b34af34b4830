"""`llorch learn`: the learner writes the stages (intermediate tensors) lesson by lesson, each checked as llorch's are.

`watch` is the loop over events; each of its keys also exists as a verb. `folder` finds the learner's folder, `shown`
prints verdicts. A lesson has parts, the functions to write; llorch's functions replace unwritten ones (BORROWED).
"""

from pathlib import Path

import click

from llorch.cli.verbs import Verbs

HELP = """Write the stages of Llama and Qwen yourself, one lesson at a time, each checked against llama.cpp and
transformers.

Without a command llorch offers a route of 90 minutes and makes a folder for your code; in that folder, or with a
folder in place of a command, it watches the folder.

\b
Exit codes: 0 all that is written passes, 1 something fails, 2 usage,
3 something could not be run (with --strict).
"""


class _Learn(Verbs):
    """Group in which a folder, an option or no word in place of a verb means `watch`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert `watch` if no verb is given."""
        word = args[0] if args else "-"
        if ctx.resilient_parsing:  # shell completion
            return super().parse_args(ctx, args)
        if word not in self.verbs and word not in ("-h", "--help") and (word.startswith("-") or Path(word).is_dir()):
            args = ["watch", *args]
        return super().parse_args(ctx, args)


command = _Learn(
    package="llorch.cli.learn",
    help=HELP,
    short_help="Build your own Llama, one lesson at a time.",
    examples=("llorch learn", "cd my_llama && llorch learn next", "llorch learn check 01b"),
    verbs={
        "Start": ("watch", "init", "list", "next"),
        "Work on a lesson": ("open", "check", "inputs", "hint", "solution", "reset"),
        "Look back": ("progress", "trace", "certificate"),
        "Go further": ("museum",),
    },
)
