"""Checks for faults of a LoRA adapter that cause no error message; each check has a name and a diagnosis.

The order is: the files, their use by other programs, the numbers, the training run, the logits of other engines.
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
# Code of the FormatError of reading an adapter -> name of the check that failed
_CHECK_BY_ERROR: dict[ErrorCode, str] = {
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
    """Check an adapter (a PEFT directory or a LoRA GGUF file) of a base; it is right if no check is broken.

    `against` lists the `ENGINES` for the comparison of logits; None means all, for models up to `LARGEST_COMPARED`.
    With `any_base`, another base is a warning instead of broken. `report` gets the name of each slow check.
    """
    adapter, base = Path(adapter), Path(base)
    with closing((weights := open_weights(base)).source):
        try:
            lora = read_adapter(adapter, weights.config)
        except FormatError as error:
            return [HealthCheck("files", _CHECK_BY_ERROR.get(error.code, "readable files"), "broken", str(error))]
        report("base")
        text = f"{len(lora.flat())} tensors of {len(lora.targets)} matrices"
        findings = [HealthCheck("files", "all tensors", "ok", text), _check_base(adapter, weights, any_base=any_base)]
        findings += [check(lora, weights) for check in READER_CHECKS]
        for check in NUMBER_CHECKS:
            report(check.__name__.replace("_", " "))
            findings.append(check(adapter, lora, weights))
        report("generate an answer to a row of the data")
        findings += check_run(adapter, weights, generating=True)
        findings += compare_engines(adapter, lora, weights, against, report)
    return findings


def _check_base(adapter: Path, weights: Weights, *, any_base: bool) -> HealthCheck:
    """Check that the adapter belongs to the base model; an unknown or (with `any_base`) another base is a warning."""
    try:
        status = check_base(adapter, weights, any_base=any_base)
    except FormatError as error:
        return HealthCheck("files", "base", "broken", str(error))
    return HealthCheck("files", "base", "warning" if status.kind in ("unknown", "another") else "ok", status.message)
