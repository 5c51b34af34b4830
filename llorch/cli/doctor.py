"""`llorch doctor`: what there is on this machine to run with, and what is broken."""

from dataclasses import asdict

import click

from llorch.cli.options import json_option, verb
from llorch.cli.outcome import DIFFERS, OK
from llorch.cli.output import progress, to_json

_SHOWN = {"ok": "ok", "absent": "-", "note": "note", "broken": "BROKEN"}


@verb(
    "What there is on this machine to run with, and what is broken.",
    "llorch doctor                   what works, what does not, and its repair",
    "llorch doctor --json            the same for a program",
    "llorch doctor > report.txt      for a bug report",
)
@json_option("One object: version, broken, findings with part, name, state, text and repair.")
def command(*, as_json: bool) -> None:
    """Look at packages, processor, memory, devices, compiled leaves, witnesses and caches; run one forward pass.

    What is not installed is no fault: the command beside it installs it. Each package is imported in a process of its
    own, so that none can end this one. Of an adapter: llorch lora doctor.

    Exit codes: 0 what is installed works, 1 something is broken.
    """
    from llorch.machine import REPORT_VERSION, examine

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
        out.print(f"{broken} broken" if broken else "what is installed works")
    raise click.exceptions.Exit(DIFFERS if broken else OK)
