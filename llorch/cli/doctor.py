"""`llorch doctor`: list the parts that work on this machine, and those that are broken."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import click

from llorch.cli.options import json_option, verb
from llorch.cli.outcome import DIFFERS, OK
from llorch.cli.output import progress, to_json

if TYPE_CHECKING:
    from llorch.apps.doctor.health import HealthCheck

JSON_HELP = "One object: version, broken, findings with area, name, state, text and repair."
_STATE_LABELS = {"ok": "ok", "absent": "-", "warning": "warning", "broken": "BROKEN"}


@verb(
    "Check what works on this machine and how to repair the rest.",
    "llorch doctor",
    "llorch doctor --json",
    "llorch doctor > report.txt",
)
@json_option(JSON_HELP)
def command(*, as_json: bool) -> None:
    """Check packages, processor, memory, devices, compiled kernels, reference engines and caches; run a forward pass.

    A package that is not installed is no fault; the command after it installs it. Each package is imported in its own
    process, so a crash cannot end this one. To check an adapter, use llorch lora doctor.

    Exit codes: 0 all that is installed works, 1 something is broken.
    """
    from llorch.apps.doctor.machine import examine

    with progress("looking at") as report:
        checks = list(examine(report))
    end_with_report(checks, as_json=as_json)


def end_with_report(checks: "Sequence[HealthCheck]", *, as_json: bool) -> NoReturn:
    """Print the report of a doctor, and end with its exit code."""
    from llorch.apps.doctor.health import n_broken, report_values
    from llorch.cli.tables import console, print_table, table

    broken = n_broken(checks)
    if as_json:
        click.echo(to_json(report_values(checks)))
    else:
        rows = table("area", "name", "", "found", "to install or repair")
        for check in checks:
            rows.add_row(check.area, check.name, _STATE_LABELS[check.state], check.text, check.repair)
        out = console()
        print_table(out, rows)
        out.print(f"{broken} broken" if broken else "nothing is broken")
    raise click.exceptions.Exit(DIFFERS if broken else OK)
