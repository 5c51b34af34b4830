"""Tables of `benchmarks/README.md`, generated from the JSON files in `benchmarks/results`.

A file `NAME.json` fills what stands between `<!-- speed: NAME -->` and `<!-- end of NAME -->`. A section without a file
keeps its text.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

SECTION = re.compile(r"(<!-- speed: (?P<name>[\w.-]+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)
Row = Mapping[str, Any]


def fill(page: str, folder: Path) -> str:
    """Return the page with the tables of the results in a folder; raise ClickException if a result has no section."""
    reports = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    missing = reports.keys() - {match["name"] for match in SECTION.finditer(page)}
    if missing:
        names = ", ".join(f"<!-- speed: {name} -->" for name in sorted(missing))
        raise click.ClickException(f"README.md: expected a section for each file in {folder}, got none for {names}")

    def section(match: re.Match[str]) -> str:
        report = reports.get(match["name"])
        return match[0] if report is None else f"{match[1]}{text_of(report)}\n{match[3]}"

    return SECTION.sub(section, page)


def text_of(report: Mapping[str, Any]) -> str:
    """Write a report as Markdown: machine, table, notes."""
    host, settings = report["machine"], report["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items())
    options = ", ".join(f"{name} {show(value)}" for name, value in settings.items())
    lines = [
        f"`python benchmarks/speed.py {report['case']}` on {host['processor']}, {host['cores']} cores, {host['date']},"
        f" llorch {host['commit']}; {options}; OpenBLAS kernels {host['openblas']} (`OPENBLAS_CORETYPE`"
        f" {host['OPENBLAS_CORETYPE']}); {versions}. Medians of the rounds, lowest and highest in brackets.",
        "",
        table(report["rows"]),
    ]
    notes = dict.fromkeys(row["note"] for row in report["rows"] if row.get("note"))
    n_rounds = sum(row.get("rounds", 0) for row in report["rows"])
    n_quiet = sum(row.get("quiet", 0) for row in report["rows"])
    if n_quiet < n_rounds:
        notes[f"other programs were busy in {n_rounds - n_quiet} of {n_rounds} measurements"] = None
    remarks = [*notes, *(f"NOT RUN: {reason}" for reason in report["not_run"])]
    return "\n".join([*lines, *(["", *(f"- {remark}" for remark in remarks)] if remarks else [])])


def show(value: object) -> str:
    """Write the value of a setting."""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def table(rows: list[Row]) -> str:
    """Write a line for each engine with a model; ratios have columns, or stand in the cells if they would be many."""
    lines: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        lines.setdefault((row["model"], f"{row['engine']} {row['variant']}".strip()), {})[row["what"]] = row
    units = {row["what"]: row["unit"] for row in rows if row["unit"] != "GB/s"}
    references = list(dict.fromkeys(name for row in rows for name in row.get("ratios", {})))
    in_columns = len(units) * len(references) <= 4
    heads = ["model", "engine"]
    for what, unit in units.items():
        heads.append(f"{what}, {unit}".removesuffix(", "))
        heads += [f"/ {name}" for name in references] if in_columns else []
    has_bandwidth = any("bandwidth" in row for row in rows)
    heads += ["weights, GB/s"] if has_bandwidth else []
    table_lines = [heads, ["---"] * len(heads)]
    for key, row_by_figure in lines.items():
        cells = [*key]
        for what in units:
            cells += figure(row_by_figure.get(what), references, in_columns)
        bandwidths = [f"{row['bandwidth']:.1f}" for row in row_by_figure.values() if "bandwidth" in row]
        cells += [bandwidths[0] if bandwidths else ""] if has_bandwidth else []
        table_lines.append(cells)
    bold = "" if in_columns or not references else f"\n\nBold: ratio to {', '.join(references)}."
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table_lines) + bold


def figure(row: Row | None, references: list[str], in_columns: bool) -> list[str]:
    """Write the cells of a figure: value with its range, and its ratios."""
    if row is None:
        return [""] * (1 + len(references) * in_columns)
    span = f" ({number(row['low'])}-{number(row['high'])})" if row.get("rounds", 1) > 1 else ""
    ratios = []
    for name in references:
        if (ratio := row.get("ratios", {}).get(name)) is None:
            ratios.append("-" if row.get("ratios") and not in_columns else "")
            continue
        median, low, high = ratio
        ratios.append(f"**{median:.2f}**" + (f" ({low:.2f}-{high:.2f})" if row["rounds"] > 1 else ""))
    value = f"{number(row['value'])}{span}"
    return [value, *ratios] if in_columns else [" ".join(filter(None, [value, *ratios]))]


def number(value: float) -> str:
    """Write three digits or more."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
