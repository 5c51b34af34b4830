"""Diagnosis of a batch: each row is diagnosed as a run of its own, and each finding names the rows that show it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from llorch.diagnosis.diagnose import diagnose
from llorch.diagnosis.dump_checker import Progress
from llorch.diagnosis.verdict import Diagnosis, Finding
from llorch.engines.dumps.stage_dump import StageDump
from llorch.files import Weights


def diagnose_rows(
    weights: Weights, rows: Sequence[StageDump], *, model: str = "", progress: Progress = lambda line: None
) -> Diagnosis:
    """Diagnose each row, see `diagnose`; return the first wrong row's diagnosis, with the findings of all rows."""
    if len(rows) == 1:
        return diagnose(weights, rows[0], model=model, progress=progress)
    diagnoses = []
    for number, dump in enumerate(rows, 1):
        prefix = f"row {number} of {len(rows)}, "
        report = lambda line, prefix=prefix: progress(prefix + line)  # noqa: E731 (binds the row)
        diagnoses.append(diagnose(weights, dump, model=model, progress=report))
    first_wrong = next((number for number, diagnosis in enumerate(diagnoses) if not diagnosis.is_right), 0)
    findings: dict[tuple[object, ...], list[tuple[int, Finding]]] = {}
    for number, diagnosis in sorted(enumerate(diagnoses), key=lambda pair: pair[0] != first_wrong):
        n_seen = Counter[tuple[object, ...]]()
        for finding in diagnosis.findings:
            n_seen[identity := _identity(finding)] += 1  # a row may have several
            findings.setdefault((n_seen[identity], *identity), []).append((number, finding))
    stages = f"the stages are those of row {first_wrong + 1}"
    note = f"a batch of {len(rows)} rows: each was judged as a run of its own; {stages}"
    return replace(
        diagnoses[first_wrong],
        findings=[_with_rows(same, len(rows)) for same in findings.values()],
        notes=list(dict.fromkeys([note, *(text for diagnosis in diagnoses for text in diagnosis.notes)])),
        not_run={reason: keys for diagnosis in diagnoses for reason, keys in diagnosis.not_run.items()},
    )


def _identity(finding: Finding) -> tuple[object, ...]:
    """Return what findings of two rows have in common if one change of the engine's code explains both."""
    names = tuple(cause.name for cause in finding.causes)
    return (finding.kind, *names) if names else (finding.kind, finding.n_pass, finding.key)


def _with_rows(same: Sequence[tuple[int, Finding]], n_rows: int) -> Finding:
    """Name the rows of equal findings in the sentence of the first."""
    by_row, finding = sorted(same, key=lambda pair: pair[0]), same[0][1]
    numbers = [number + 1 for number, _ in by_row]
    if len(numbers) == n_rows:
        where = f"all {n_rows} rows"
    elif len(numbers) == 1:
        where = f"row {numbers[0]} of {n_rows} only"
    else:
        where = f"rows {', '.join(map(str, numbers[:-1]))} and {numbers[-1]} of {n_rows} only"
    values = [row_finding.causes[0].value for _, row_finding in by_row if row_finding.causes]
    row_values = f" The values of these rows are {', '.join(values)}." if len({*values}) > 1 else ""
    return replace(finding, sentence=f"{where}: {finding.sentence}{row_values}")
