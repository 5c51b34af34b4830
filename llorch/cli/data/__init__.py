"""`llorch data`: look at training data."""

import click

from llorch.cli.verbs import Verbs

HELP = """\b
llorch data show story path/to/data

Look at training data as the model will see it.
"""


class Data(Verbs):
    """The verbs of `llorch data`."""

    verbs = ("show",)
    package = "llorch.cli.data"


@click.group(cls=Data, help=HELP, short_help="Show which tokens of training data are learned.")
def command() -> None:
    """Only verbs do something."""
