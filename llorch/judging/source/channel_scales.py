"""Channel scales of AWQ and SmoothQuant: factors moved from one weight into the next, so that their product is equal.

    norm, q k v or gate up     gain / s and W diag(s): the input of the matrices is divided, their columns multiplied
    v and o, up and down       diag(1 / t) W and W diag(t): the rows of one matrix, the columns of the next

s follows from the two gains; t is fitted to the rows of the first matrix, and then judged in the columns of the second.

Source: AWQ arXiv:2306.00978 section 3.2; SmoothQuant arXiv:2211.10438; llmcompressor `modifiers/awq/mappings.py`.
"""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace

import numpy as np

from llorch.judging.source.grids import BlockReport
from llorch.judging.source.tensors import Expected, ModelTensors, RowIds, WeightReport, judge_weight

_GAIN_ERROR = 2.0**-7  # of a quotient of two gains in bfloat16
_FIT_ERROR = 0.02  # of a factor that was fitted to the codes of a row
_READERS = {  # norm -> matrices of the layer that read it
    "input_layernorm.weight": r"self_attn\.[qkv]_proj\.weight|linear_attn\.in_proj_\w+\.weight",
    "post_attention_layernorm.weight": r"(mlp|feed_forward)\.(.+\.)?(gate|up)_proj\.weight|\w+\.(gate|router)\.weight",
}
_PAIRS = (("self_attn.v_proj", "self_attn.o_proj"), ("mlp.up_proj", "mlp.down_proj"))


def with_channel_scales(
    file: ModelTensors, source: ModelTensors, reports: Sequence[WeightReport], pool: Executor
) -> list[WeightReport]:
    """Replace the reports of weights that differ by channel scales; others, and those of a wrong product, stay."""
    by_name = {report.name: report for report in reports}
    expected = {name: source.expect(name) for name in by_name}
    for name, report in by_name.items():
        prefix, _, short = name.rpartition(".layers.")
        layer, _, short = short.partition(".")
        if report.wrong and short in _READERS:
            start = f"{prefix}.layers.{layer}."
            readers = [
                n for n in by_name if n.startswith(start) and re.fullmatch(_READERS[short], n.removeprefix(start))
            ]
            _apply_gain(file, source, name, readers, by_name, expected, pool)
    for first, second in _PAIRS:
        for name in [name for name in by_name if name.endswith(f".{first}.weight")]:
            _apply_pair(file, name, name.replace(first, second), by_name, expected, pool)
    return [by_name[report.name] for report in reports]


def _apply_gain(
    file: ModelTensors, source: ModelTensors, norm: str, readers: Sequence[str], by_name: dict[str, WeightReport],
    expected: dict[str, Expected], pool: Executor,
) -> None:  # fmt: skip
    """Judge the readers of a norm with its channel scales; accept them if at least the unpaired readers pass."""
    rows = np.arange(source.form(norm).weight_shape[0])
    with np.errstate(all="ignore"):
        scales = (source.read(norm, rows) / file.read(norm, rows)).reshape(1, -1)
    if not readers or not np.isfinite(scales).all():
        return
    scaled = {name: _scale(expected[name], scales, _GAIN_ERROR) for name in readers}
    reports = {name: _judge(file, by_name[name], scaled[name], pool) for name in readers}
    paired = tuple(f".{first}.weight" for first, _ in _PAIRS)
    if any(report.wrong and not name.endswith(paired) for name, report in reports.items()):
        return
    by_name[norm] = replace(by_name[norm], blocks=BlockReport(len(rows)), has_channel_scales=True)
    by_name.update(reports)
    expected.update(scaled)


def _apply_pair(
    file: ModelTensors, first: str, second: str, by_name: dict[str, WeightReport], expected: Mapping[str, Expected],
    pool: Executor,
) -> None:  # fmt: skip
    """Judge two matrices whose product is that of the source, with a factor for each channel between them."""
    if second not in by_name or not (by_name[first].wrong and by_name[second].wrong):
        return
    n_rows, n_columns = file.form(first).weight_shape[0], file.form(second).weight_shape[1]
    if n_rows != n_columns:
        return  # grouped values are not scaled
    rows = np.arange(n_rows)
    actual, values = file.read(first, rows), expected[first](rows)[0]
    with np.errstate(all="ignore"):
        scales = np.einsum("ij,ij->i", values, values) / np.einsum("ij,ij->i", values, actual)
    if not np.isfinite(scales).all():
        return
    reports = {
        first: _judge(file, by_name[first], _scale(expected[first], 1 / scales, _FIT_ERROR, by_row=True), pool),
        second: _judge(file, by_name[second], _scale(expected[second], scales[None, :], _FIT_ERROR), pool),
    }
    if not any(report.wrong for report in reports.values()):
        by_name.update(reports)


def _judge(file: ModelTensors, report: WeightReport, expected: Expected, pool: Executor) -> WeightReport:
    scaled = judge_weight(file, report.name, expected, pool)
    return replace(scaled, types=report.types, has_channel_scales=True)


def _scale(expected: Expected, scales: np.ndarray, error: float, *, by_row: bool = False) -> Expected:
    """Multiply columns, or rows, by factors with a relative error."""

    def scaled(rows: RowIds) -> tuple[np.ndarray, np.ndarray | float]:
        values, uncertainty = expected(rows)
        factors = scales[rows][:, None] if by_row else scales
        product = values * factors
        return product, uncertainty * np.abs(factors) + error * np.abs(product)

    return scaled
