"""Findings about errors outside the values that a stage has, which the reader of a dump found."""

from collections.abc import Iterator

from llorch.diagnosis.verdict import Finding
from llorch.engines.dumps.stage_dump import StageDump


def defect_findings(dump: StageDump) -> Iterator[Finding]:
    """Yield a finding for each defect of a dump, such as logits whose largest value is in the padding."""
    for defect in dump.defects:
        yield Finding(
            "unknown", defect.key, defect.n_pass, starts_in=(defect.key,), layers=(), causes=(), near_misses=(),
            places=((defect.n_pass, defect.key),), sentence=defect.sentence,
        )  # fmt: skip
