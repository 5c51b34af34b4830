"""`llorch doctor`: what there is on this machine to run with, and what is broken."""

from dataclasses import asdict

import click

from llorch.cli.options import json_option, verb
from llorch.cli.outcome import DIFFERS, OK
from llorch.cli.output import progress, to_json

_SHOWN = {"ok": "ok", "absent": "-", "note": "note", "broken": "BROKEN"}


@verb(
    "Check what works on this machine and how to repair the rest.",
    "llorch doctor",
    "llorch doctor --json",
    "llorch doctor > report.txt",
)
@json_option("One object: version, broken, findings with part, name, state, text and repair.")
def command(*, as_json: bool) -> None:
    """Check packages, processor, memory, devices, compiled kernels, reference engines and caches; run a forward pass.

    A package that is not installed is no fault; the command after it installs it. Each package is imported in its own
    process, so a crash cannot end this one. To check an adapter, use llorch lora doctor.

    Exit codes: 0 all that is installed works, 1 something is broken.
    """
    from llorch.apps.doctor.machine import REPORT_VERSION, examine

    with progress("looking at") as tell:
        findings = list(examine(tell))
    broken = sum(one.state == "broken" for one in findings)
    if as_json:
        listed = [asdict(one) for one in findings]
        click.echo(to_json({"version": REPORT_VERSION, "broken": broken, "findings": listed}))
    else:
        from llorch.cli.tables import console, print_table, table

        rows = table("part", "name", "", "found", "to install or repair")
        for one in findings:
            rows.add_row(one.part, one.name, _SHOWN[one.state], one.text, one.repair)
        out = console()
        print_table(out, rows)
        out.print(f"{broken} broken" if broken else "everything that is installed works")
    raise click.exceptions.Exit(DIFFERS if broken else OK)
