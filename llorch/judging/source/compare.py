"""Compare a file with the source that it was made from: hyperparameters, tokenizer and every weight."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from llorch.files import Weights
from llorch.files.packed import has_codes
from llorch.judging.compare import compare_exact
from llorch.judging.source.channel_scales import with_channel_scales
from llorch.judging.source.settings import compare_settings, incompatible
from llorch.judging.source.tensors import (
    EMBEDDING,
    HEAD,
    ModelTensors,
    RowIds,
    WeightReport,
    compare_weight,
    copy_of,
    judge_weight,
    sample_rows,
)
from llorch.judging.source.vocabulary import compare_vocabularies
from llorch.judging.source.wrong_forms import find_causes
from llorch.judging.types import Cause, Comparison
from llorch.runtime.errors import UserError
from llorch.stages.comparison import FAIL, PASS, Difference
from llorch.stages.stage_ref import StageRef

Progress = Callable[[str], None]

_SCALES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # errors of a scale that `find_smallest_error` tries


@dataclass(frozen=True)
class SourceReport:
    """Result of comparing a file with its source.

    Attributes:
        comparisons: Comparisons of hyperparameters, tokenizer and weights; a note with PASS changes no number.
        weights: Reports of the weights that both have.
        causes: Mistakes that explain the weights that differ.
        smallest_errors: By stored type in the file: the smallest errors that fail, tried on a weight of the file.
    """

    comparisons: list[Comparison]
    weights: list[WeightReport]
    causes: list[Cause]
    smallest_errors: dict[str, str]

    @property
    def failures(self) -> list[Comparison]:
        """Comparisons that failed."""
        return [comparison for comparison in self.comparisons if comparison.verdict == FAIL]

    @property
    def notes(self) -> list[Comparison]:
        """Comparisons that passed, with a note on a difference that changes no number."""
        return [comparison for comparison in self.comparisons if comparison.verdict == PASS and comparison.note]


def compare_with_source(
    file: Weights, source: Weights, source_tensors: ModelTensors | None = None, *,
    model: str, n_threads: int = 2, progress: Progress = lambda line: None,
) -> SourceReport:  # fmt: skip
    """Compare a file, which may lack tensors, with its source.

    `source_tensors` replaces the tensors of the source, for a base with an adapter. UserError if the two models cannot
    be two forms of one.
    """
    if reason := incompatible(file.config, source.config):
        raise UserError(reason)
    tensors = ModelTensors(file), source_tensors or ModelTensors(source)
    comparisons = [*compare_settings(file.config, source.config, model=model)]
    progress("comparing the tokenizers")
    comparisons += compare_vocabularies(file, source, model=model)
    comparisons += _compare_names(*tensors, model=model)
    with ThreadPoolExecutor(n_threads) as pool:
        weights = list(_compare_weights(*tensors, pool, progress))
        if any(report.wrong and has_codes(report.types[0]) for report in weights):
            weights = with_channel_scales(*tensors, weights, pool)
        causes = find_causes(*tensors, [report for report in weights if report.wrong], pool, progress)
        smallest_errors = _find_smallest_errors(*tensors, weights, pool)
    sentences = {name: cause.sentence.partition(": ")[2] or cause.sentence for cause in causes for name in cause.stages}
    comparisons += [_compare(report, sentences.get(report.name, ""), model) for report in weights]
    return SourceReport(comparisons, weights, causes, smallest_errors)


def _compare_names(file: ModelTensors, source: ModelTensors, *, model: str) -> Iterator[Comparison]:
    """Compare the sets of weights, and the shapes of their tensors."""
    ref = StageRef("00", "weights")
    for name in dict.fromkeys([*source.forms, *file.forms]):
        note = ""
        if name == HEAD and (HEAD not in file.forms or HEAD not in source.forms):
            continue  # a tied head; its values are compared with the embedding
        if name not in file.forms:
            note = "missing in the file"
        elif name not in source.forms:
            note = "additional: the source has no such weight"
        elif faults := file.wrong_shapes(name):
            note = "; ".join(faults)
        if note:
            yield compare_exact(replace(ref, part=name), "source", 1.0, note, model=model, backend="file")
    for tensor in file.additional:
        note = f"additional: no weight of this model is stored in {tensor}"
        yield compare_exact(replace(ref, part=tensor), "source", 1.0, note, model=model, backend="file")


def _compare_weights(
    file: ModelTensors, source: ModelTensors, pool: Executor, progress: Progress
) -> Iterator[WeightReport]:
    """Compare all weights that both models have; a head only if one of them has one of its own."""
    names = [name for name in source.forms if name in file.forms]
    if (HEAD in file.forms) != (HEAD in source.forms) and EMBEDDING in names:
        names.append(HEAD)
    for index, name in enumerate(names):
        progress(f"comparing tensor {index + 1} of {len(names)}: {name}")
        if not file.wrong_shapes(name):
            yield compare_weight(file, source, name, pool)


def _compare(report: WeightReport, sentence: str, model: str) -> Comparison:
    """Make the comparison of a weight."""
    share = report.n_wrong / max(report.blocks.n_blocks, 1)
    note = sentence if report.wrong else _note(report)
    comparison = compare_exact(
        StageRef("00", "weights", part=report.name), "source", share, note, model=model, backend="file"
    )
    return replace(comparison, difference=Difference(report.error, share), verdict=FAIL if report.wrong else PASS)


def _note(report: WeightReport) -> str:
    """Describe what the arithmetic of a right conversion did beyond the rounding of the type."""
    file_type, source_type = (kind.name for kind in report.types)
    if report.has_channel_scales:
        return "channel scales of AWQ or SmoothQuant: the product with the next matrices is that of the source"
    if report.copy is not None:
        return f"made through a copy in {report.copy.name}"
    if has_codes(report.types[1]) and file_type != source_type:
        return f"{file_type} made from {source_type}"
    if report.blocks.fitted:
        return "scales are fitted, as an importance matrix does"
    if report.blocks.n_compensated:
        return "codes compensate for the rounding of earlier columns, as GPTQ does"
    return ""


def _find_smallest_errors(
    file: ModelTensors, source: ModelTensors, reports: list[WeightReport], pool: Executor
) -> dict[str, str]:
    """Measure for each type, on the first matrix of that type that passed, the smallest errors that fail."""
    errors: dict[str, str] = {}
    for report in reports:
        kind = report.types[0]
        if (
            not (report.wrong or report.has_channel_scales)
            and source.form(report.name).weight_shape[1] > 1
            and kind.name not in errors
        ):
            errors[kind.name] = find_smallest_error(file, source, report, pool)
    return errors


def find_smallest_error(file: ModelTensors, source: ModelTensors, report: WeightReport, pool: Executor) -> str:
    """Describe the smallest errors that fail in some rows of a weight: of scales, of one scale, of the order."""
    rows = sample_rows(report, n_others=64)
    expected = source.expect(report.name)
    expected = copy_of(expected, report.copy) if report.copy is not None else expected

    def fails(change: Callable[[np.ndarray], None]) -> bool:
        def changed(chunk: RowIds) -> tuple[np.ndarray, np.ndarray | float]:
            values, uncertainty = expected(chunk)
            values = values.copy()
            change(values)
            return values, uncertainty

        return bool(judge_weight(file, report.name, changed, pool, rows=rows).wrong)

    def scale(part: tuple[slice, slice], factor: float) -> Callable[[np.ndarray], None]:
        def change(values: np.ndarray) -> None:
            values[part] *= np.float32(1 + factor)

        return change

    def exchange(values: np.ndarray) -> None:
        values[[0, 1]] = values[[1, 0]]

    def replace_block(values: np.ndarray) -> None:
        values[0, :32] = values[1, :32]

    parts = {"the scale of the matrix": np.s_[:, :], "of one row": np.s_[:1, :], "of 32 values": np.s_[:1, :32]}
    sentences = []
    for label, part in parts.items():
        factor = next((factor for factor in _SCALES if fails(scale(part, factor))), None)
        sentences.append(f"{label} by {factor:.1%}" if factor else f"{label}: not seen")
    others = {"two rows exchanged": exchange, "32 values replaced": replace_block}
    return ", ".join(
        [*sentences, *(label if fails(change) else f"{label}: not seen" for label, change in others.items())]
    )
