"""`llorch data`: show training data."""

from llorch.cli.verbs import Verbs

command = Verbs(
    package="llorch.cli.data", verbs={"Commands": ("show",)}, help="Show training data as the model will see it.",
    short_help="Show which tokens of training data count in the loss.",
    examples=("llorch data show story path/to/data",),
)  # fmt: skip
