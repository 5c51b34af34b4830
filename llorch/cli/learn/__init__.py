"""`llorch learn`: write the stages yourself, one checkpoint at a time, each judged as ours are.

`watch` is the loop, told by `events`, and what it does at a key is a verb, too; `folder` finds the learner's, `shown`
prints verdicts.
"""

from pathlib import Path

import click

from llorch.cli.verbs import Verbs

HELP = """Write the stages of Llama and Qwen yourself, one lesson at a time, each checked against llama.cpp and
transformers.

Without a command, or with a folder in its place, llorch watches the folder.

\b
Exit codes: 0 all that is written passes, 1 something fails, 2 usage,
3 something could not be run (with --strict).
"""


class _Learn(Verbs):
    """The group; a folder, an option or nothing where a verb would stand means `watch`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the verb in its place."""
        word = args[0] if args else "-"
        if ctx.resilient_parsing:  # a shell completes the verb
            return super().parse_args(ctx, args)
        if word not in self.verbs and word not in ("-h", "--help") and (word.startswith("-") or Path(word).is_dir()):
            args = ["watch", *args]
        return super().parse_args(ctx, args)


command = _Learn(
    package="llorch.cli.learn",
    help=HELP,
    short_help="Build your own Llama, one lesson at a time.",
    examples=("llorch learn init my_llama", "cd my_llama && llorch learn", "llorch learn check 01b"),
    verbs={
        "Start": ("watch", "init", "list", "next"),
        "Work on a lesson": ("check", "inputs", "hint", "solution", "reset"),
        "Look back": ("progress", "certificate"),
        "Go further": ("museum",),
    },
)
