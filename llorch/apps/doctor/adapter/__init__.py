"""Faults of an adapter that cause no error message: each is a check with a name and a diagnosis.

The files come first, then their use by other programs, then the numbers, at last the logits of other engines.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from llorch.apps.doctor.adapter.checks import NUMBER_CHECKS, READER_CHECKS, check_run
from llorch.apps.doctor.adapter.engines import compare_engines
from llorch.apps.doctor.health import HealthCheck
from llorch.files import Weights, open_weights
from llorch.lora.files import check_base, read_adapter
from llorch.runtime.errors import ErrorCode, FormatError

ENGINES = ("peft", "llamacpp")
# What a file is refused for, as the name of a check.
_CHECK_OF: dict[ErrorCode, str] = {
    "Missing": "all tensors",
    "Unexpected": "all tensors",
    "Shape": "shapes",
    "NonFinite": "finite numbers",
    "Unsupported": "known features",
    "OutOfRange": "sound settings",
    "BaseMismatch": "base",
}


def examine(
    adapter: str | Path,
    base: str | Path,
    *,
    against: tuple[str, ...] | None = None,
    any_base: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> list[HealthCheck]:
    """Check an adapter, a PEFT directory or a LoRA GGUF file; nothing is wrong where no check is broken.

    `against` are engines whose logits are compared; None takes those that are installed, for models of moderate size.
    `any_base` warns of another base instead of calling it wrong.
    """
    adapter, base = Path(adapter), Path(base)
    with closing((weights := open_weights(base)).source):
        try:
            read = read_adapter(adapter, weights.config)
        except FormatError as error:
            return [HealthCheck("files", _CHECK_OF.get(error.code, "readable files"), "broken", str(error))]
        report("base")
        text = f"{len(read.flat())} tensors of {len(read.targets)} matrices"
        findings = [HealthCheck("files", "all tensors", "ok", text), _base(adapter, weights, any_base=any_base)]
        findings += [check(read, weights) for check in READER_CHECKS]
        for check in NUMBER_CHECKS:
            report(check.__name__.replace("_", " "))
            findings.append(check(adapter, read, weights))
        report("generate an answer to a row of the data")
        findings += check_run(adapter, weights, generating=True)
        findings += compare_engines(adapter, read, weights, against, report)
    return findings


def _base(adapter: Path, weights: Weights, *, any_base: bool) -> HealthCheck:
    """Check that the adapter belongs to the base model; an unknown or another base is a warning."""
    try:
        status = check_base(adapter, weights, any_base=any_base)
    except FormatError as error:
        return HealthCheck("files", "base", "broken", str(error))
    return HealthCheck("files", "base", "warning" if status.kind in ("unknown", "another") else "ok", status.message)
