"""`llorch data`: look at training data."""

from llorch.cli.verbs import Verbs

HELP = """\b
llorch data show story path/to/data

Look at training data as the model will see it.
"""

command = Verbs(
    package="llorch.cli.data", verbs=("show",),
    help=HELP, short_help="Show which tokens of training data are learned.",
)  # fmt: skip
