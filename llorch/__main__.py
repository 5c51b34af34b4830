"""`python -m llorch` is the command `llorch`."""

from llorch.cli import main

main(prog_name="llorch")
