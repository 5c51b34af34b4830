"""One forward pass of a built-in model, every stage of it against what two engines showed."""

from pathlib import Path

from llorch.apps.doctor.machine.finding import HealthCheck
from llorch.judging.goldens.forward import read
from llorch.model.model import load
from llorch.runtime.builtin import goldens_folder
from llorch.stages.comparison import compare

_MODEL = "micro-llama"
_REPAIR = "llorch verify  # every model and stage, with the first wrong number"


def self_test(goldens: Path | None = None) -> HealthCheck:
    """Run it; broken where a stage differs, or where it does not run at all."""
    try:
        golden = read((goldens or goldens_folder()) / _MODEL)
        trace: dict = {}
        load(_MODEL).forward(golden.cases["near"].ids, trace=trace)
        reports = {engine: compare(trace, shown.traces["near"]) for engine, shown in golden.engine_outputs.items()}
    except (OSError, ValueError, ImportError, ArithmeticError, MemoryError) as error:
        return HealthCheck("self-test", _MODEL, "broken", f"failed to run: {' '.join(str(error).split())}", _REPAIR)
    wrong = {engine: report for engine, report in reports.items() if not report.agrees}
    text = "; ".join(f"{engine}: {report}" for engine, report in (wrong or reports).items())
    return HealthCheck("self-test", _MODEL, "broken" if wrong else "ok", text, _REPAIR if wrong else "")
