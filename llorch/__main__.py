"""Entry point of `python -m llorch`, the command `llorch`."""

import sys

try:
    from llorch.cli import main
except ModuleNotFoundError as error:  # click prints every other error
    from llorch.apps.doctor.machine.packages import missing_extra

    missing = missing_extra(error)
    if missing is None:
        raise
    print(f"llorch: {missing}", file=sys.stderr)
    sys.exit(3)

main(prog_name="llorch")
