"""Bug reports of other engines, re-enacted on the port.

Each has its thread, the symptom, the cause, and the mistake that a diagnosis should name, or none if no known mistake
fits. If the report is about another model of the family or another width, the cause is the same and the numbers are
those of a built-in model.
"""

from benchmarks.diagnosis.reenacted import layouts, operations, positions, precision, settings
from benchmarks.diagnosis.reenacted.reporting import REPORTS, Report

PAGES = (layouts, settings, operations, positions, precision)  # each registers its reports
__all__ = ["PAGES", "REPORTS", "Report"]
