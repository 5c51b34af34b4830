"""Join findings that one change of an engine's code explains: every norm, every rotation, every product of a type."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from llorch.diagnosis.patterns.axes import join_words
from llorch.diagnosis.replay import Replay
from llorch.diagnosis.verdict import Finding, StageCheck
from llorch.judging.tolerances.forward import CACHES
from llorch.stages.comparison import FAIL
from llorch.stages.table import BY_NAME, matrix_of

ROTATIONS = frozenset({"q_rope", "k_rope"})


def join_findings(findings: Sequence[Finding], checks: Sequence[StageCheck], replay: Replay) -> list[Finding]:
    """Join the findings with equal causes, and the unknown ones whose stages call one function of an engine.

    Unknown findings are joined if the function is wrong wherever the dump shows it, or if their patterns are equal.
    """
    joined: list[Finding] = []
    for finding in findings:
        index = next((i for i, earlier in enumerate(joined) if _is_same(earlier, finding, checks, replay)), None)
        if index is None:
            joined.append(finding)
        else:
            joined[index] = _join(joined[index], finding)
    return [_with_scope(finding, checks, replay) for finding in joined]


def _is_same(earlier: Finding, finding: Finding, checks: Sequence[StageCheck], replay: Replay) -> bool:
    if earlier.kind != finding.kind:
        return False
    if finding.causes:
        return [(cause.name, cause.value) for cause in earlier.causes] == [
            (cause.name, cause.value) for cause in finding.causes
        ]
    functions = _functions(earlier, replay) & _functions(finding, replay)
    is_alike = bool(earlier.pattern) and earlier.pattern == finding.pattern
    return finding.kind == "unknown" and any(is_alike or _is_always_wrong(f, checks, replay) for f in functions)


def _functions(finding: Finding, replay: Replay) -> set[str]:
    """Return the functions that compute all stages where an error may start."""
    return set.intersection(*({*_functions_of(key, replay)} for key in finding.starts_in))


def _functions_of(key: str, replay: Replay) -> Iterator[str]:
    """Yield the functions that compute a stage, in words: any product, and the decoder of a type of matrix."""
    stage, layer = replay.stages[key]
    matrix = "embed_tokens" if stage.name == "embed" else matrix_of(stage, replay.config)
    name = matrix if layer is None else f"layers.{layer}.{matrix}"
    if matrix and name in replay.weights:
        yield f"stage that reads a {replay.weights.stored_type(name).name} matrix"
    if stage.matrix:
        yield "product with a matrix"
    elif stage.name in ROTATIONS:
        yield "rotation"
    elif stage.name in CACHES:
        yield "cache"
    elif stage.name.endswith("norm"):
        yield "norm"


def _is_always_wrong(function: str, checks: Sequence[StageCheck], replay: Replay) -> bool:
    """Tell if a function is wrong in all dumped stages that it computes, of at least two stages."""
    same = [check for check in checks if function in _functions_of(check.key, replay)]
    return len({check.stage for check in same}) > 1 and all(check.verdict == FAIL for check in same)


def _join(finding: Finding, other: Finding) -> Finding:
    return replace(
        finding,
        starts_in=tuple(dict.fromkeys((*finding.starts_in, *other.starts_in))),
        layers=tuple(sorted({*finding.layers, *other.layers})),
        places=(*finding.places, *other.places),
    )


def _with_scope(finding: Finding, checks: Sequence[StageCheck], replay: Replay) -> Finding:
    """Add to the sentence of a joined unknown finding the function that is wrong everywhere, or the stages."""
    stages = list(dict.fromkeys(key.rpartition(".")[2] for _, key in finding.places))
    if finding.kind == "rounding" or len(stages) < 2 or len(finding.starts_in) < 2:
        return finding
    functions = sorted(_functions(finding, replay), key=len)  # any product before the product of a type
    wrong = next((function for function in functions if _is_always_wrong(function, checks, replay)), "")
    scope = f"every {wrong}" if wrong else join_words(stages)
    has_right = any(check.verdict != FAIL and BY_NAME[check.stage].matrix for check in checks)
    contrast = ", those with other matrices are right" if "reads a" in wrong and has_right else ""
    return replace(finding, sentence=f"{finding.sentence} The same in {scope}{contrast}: look for one cause.")
