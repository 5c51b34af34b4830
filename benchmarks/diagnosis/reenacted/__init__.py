"""Reports of others, re-enacted on the port: what happened in their engines, planted in ours.

Each names its thread, what was seen, what the cause was, and the mistake that a diagnosis should name; where the
library of known mistakes has none, that nothing known makes it. Where the original concerned another model of the
family or another width, the cause is the same and the numbers are those of a built-in model.
"""

from benchmarks.diagnosis.reenacted import layouts, operations, positions, precision, settings
from benchmarks.diagnosis.reenacted.reporting import REPORTS, Report

PAGES = (layouts, settings, operations, positions, precision)  # each enters its reports
__all__ = ["PAGES", "REPORTS", "Report"]
