"""Find the mistake of a converter: try unlawful forms of the source on each weight that differs.

A form explains a weight if the file's rows are lawful for the values in that form. Weights with the same mistake are
one finding, so that one wrong rule of a converter is one finding with its tensors.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor

import numpy as np

from llorch.files.packed import has_codes
from llorch.judging.source.tensors import (
    HEAD,
    Expected,
    ModelTensors,
    RowIds,
    WeightReport,
    WrongForm,
    judge_weight,
    sample_rows,
)
from llorch.judging.types import Cause

_LIKE = 0.4  # least cosine of rows that are tried in place of each other: ternary codes leave 0.49 at outliers
_FEW_BLOCKS = 1e-3  # share of wrong blocks that are named one by one, with at least `_FEW_ROWS`
_FEW_ROWS = 8
_NEAR = 0.1  # relative error below which values are only rounded
_FACTOR_ERROR = 2.0**-20  # relative error of a factor that was measured
_CODES_ERROR = 2.0**-8  # the same, measured on codes
_NOT_REORDERED = "rows or columns are in the order of transformers: not reordered"
_NEAR_VALUES = "less than 10 % from the source: rounded to fewer bits on the way, or another version of the weights"
_N_OTHERS = 3  # other weights that are tried, the nearest first


def find_causes(
    file: ModelTensors, source: ModelTensors, reports: Sequence[WeightReport], pool: Executor,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Cause]:  # fmt: skip
    """Explain the weights that differ; the mistake with the most weights comes first."""
    names_by_form: dict[tuple[str, str], list[str]] = defaultdict(list)
    for report in reports:
        progress(f"explaining {report.name}")
        form = _explain(file, source, report, pool)
        names_by_form[form.rule, form.sentence].append(report.name)
    causes = [
        Cause(rule, "mistake", f"{_module_names(names)}: {sentence}", tuple(names), 1.0, 0.0)
        for (rule, sentence), names in names_by_form.items()
    ]
    return sorted(_join_exchanges(causes), key=lambda cause: -len(cause.stages))


def _explain(file: ModelTensors, source: ModelTensors, report: WeightReport, pool: Executor) -> WrongForm:
    """Return the first form that explains a weight, or a description of its differences."""
    if report.name == HEAD and HEAD not in file.forms:
        return WrongForm("head left out", "the output matrix is left out, so engines use the embedding")
    if report.n_nonfinite:
        return WrongForm("non-finite", f"NaN or infinite values: {report.n_nonfinite}")
    if report.range[0] == report.range[1] and report.n_rows > 1:
        rule = "zeroed" if report.range[0] == 0 else "constant"
        return WrongForm(rule, f"all values are {report.range[0]:.6g}")
    wrong_rows = list(dict.fromkeys(row for row, _ in report.wrong))
    rows = sample_rows(report)
    if not file.read(report.name, np.intersect1d(rows, wrong_rows)).any():
        return WrongForm("zeroed rows", f"{len(wrong_rows)} rows are zeros, the first is row {wrong_rows[0]}")
    for form in _candidates(file, source, report, rows):
        assert form.expected is not None
        if not judge_weight(file, report.name, form.expected, pool, rows=rows).wrong:
            return form
    return _describe(report)


def _describe(report: WeightReport) -> WrongForm:
    """Describe differences that no form explains: damaged blocks, a coarser rounding, or other values."""
    n_wrong, n_blocks = report.n_wrong, report.blocks.n_blocks
    if n_wrong <= max(_FEW_ROWS, _FEW_BLOCKS * n_blocks) and n_wrong < n_blocks:
        row, block = report.wrong[0]
        return WrongForm(
            "damaged", f"{n_wrong} of {n_blocks} blocks are damaged, the first is block {block} of row {row}"
        )
    if report.error < _NEAR:
        return WrongForm("near values", _NEAR_VALUES)
    return WrongForm("other values", "other values than in the source")


def _candidates(file: ModelTensors, source: ModelTensors, report: WeightReport, rows: RowIds) -> Iterator[WrongForm]:
    """Yield the forms to try on a weight, the most probable first."""
    name = report.name
    expected = source.expect(name)
    yield from source.wrong_merges(file, name, rows)
    yield from _wrong_values(name, expected, file)
    yield from _wrong_orders(name, expected, file)
    actual, values = file.read(name, rows), expected(rows)[0]
    yield from _scaled(actual, values, expected, _CODES_ERROR if has_codes(report.types[0]) else _FACTOR_ERROR)
    yield from _other_weights(name, actual, rows, source)
    n_rows, n_columns = source.form(name).weight_shape
    if n_rows == n_columns:
        columns = file.form(name).columns
        columns = np.arange(n_rows) if columns is None else columns
        yield WrongForm("transposed", "rows and columns are exchanged", _transpose(expected, columns))
    if n_columns > 1:
        yield from _wrong_rows(name, actual, rows, source, report)
    else:
        yield from _wrong_vector(name, file, source, report)


def _wrong_values(name: str, expected: Expected, file: ModelTensors) -> Iterator[WrongForm]:
    """Yield forms of norm gains and decays whose value was not converted, or converted twice."""

    def change(function: Callable[[np.ndarray], np.ndarray]) -> Expected:
        def changed(rows: RowIds) -> tuple[np.ndarray, np.ndarray | float]:
            values, uncertainty = expected(rows)
            with np.errstate(all="ignore"):
                return function(values.astype(np.float64)), uncertainty

        return changed

    if name.endswith("norm.weight"):
        yield WrongForm("norm without 1", "the 1 of the gain is missing", change(lambda gain: gain - 1))
        yield WrongForm("norm plus 1", "a 1 too many was added to the gain", change(lambda gain: gain + 1))
    if name.endswith(".A_log"):
        yield WrongForm("decay without exp", "A_log is stored, not -exp(A_log)", change(lambda decay: np.log(-decay)))
        yield WrongForm("decay without sign", "exp(A_log) is stored, not -exp(A_log)", change(lambda decay: -decay))


def _reorder(expected: Expected, order: np.ndarray) -> Expected:
    return lambda rows: expected(order[rows])


def _transpose(expected: Expected, columns: np.ndarray) -> Expected:
    """Return the transposed square matrix; `columns` has the stored column of each column."""

    def transposed(rows: RowIds) -> tuple[np.ndarray, np.ndarray | float]:
        values = expected(np.arange(len(columns)))[0][:, np.argsort(columns)]
        return values.T[rows][:, columns], 0.0

    return transposed


def _wrong_orders(name: str, expected: Expected, file: ModelTensors) -> Iterator[WrongForm]:
    """Yield orders of rows, or of columns, that a wrong converter writes: not changed, twice, by other heads."""
    form = file.form(name)
    n_rows, _ = form.weight_shape
    stored = np.arange(n_rows) if form.rows is None else form.rows  # stored row of each row
    if form.rows is not None and len(np.unique(stored)) == n_rows == stored.max() + 1:
        order = np.argsort(stored)  # row of each stored row
        yield WrongForm("not reordered", _NOT_REORDERED, _reorder(expected, stored))
        yield WrongForm("reordered twice", "the rows are reordered twice", _reorder(expected, order[order][stored]))
        yield WrongForm(
            "reordered back", "the rows are reordered in the opposite way", _reorder(expected, stored[stored])
        )
    if form.columns is not None:
        yield WrongForm("not reordered", _NOT_REORDERED, _reorder_columns(expected, form.columns))
    yield WrongForm("columns reversed", "the columns are in reverse order", _reorder_columns(expected, np.s_[::-1]))
    heads = {"q_proj": file.config.n_heads, "k_proj": file.config.n_kv_heads}
    own_heads = heads.get(name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2])
    for n_heads in dict.fromkeys(heads.values()) if own_heads else ():
        if n_rows % (2 * n_heads) == 0:
            order = np.arange(n_rows).reshape(n_heads, 2, -1).swapaxes(1, 2).reshape(-1)
            reason = f"as {n_heads} heads" if n_heads != own_heads else "which this architecture does not need"
            sentence = f"the rows are reordered for RoPE, {reason}"
            yield WrongForm("reordered for RoPE", sentence, _reorder(expected, order[stored]))


def _reorder_columns(expected: Expected, columns: np.ndarray | slice) -> Expected:
    return lambda rows: (expected(rows)[0][:, columns], 0.0)


def _scaled(actual: np.ndarray, values: np.ndarray, expected: Expected, factor_error: float) -> Iterator[WrongForm]:
    """Yield the form multiplied by the factor that fits best, if rows are otherwise alike."""
    exact = values.astype(np.float64)  # sums in float32 lose more than `_FACTOR_ERROR`
    square = float(np.vdot(exact, exact))
    factor = float(np.vdot(actual.astype(np.float64), exact)) / square if square else 1.0
    is_other = abs(factor) > 1e-6 and abs(factor - 1) > factor_error
    if is_other and _cosine(actual.reshape(1, -1), values.reshape(1, -1))[0] ** 2 > _LIKE**2:
        rounded = float(f"{factor:.3g}")
        for scale in (rounded, factor):

            def scaled(rows: RowIds, scale: float = scale) -> tuple[np.ndarray, np.ndarray | float]:
                values, uncertainty = expected(rows)
                return values * np.asarray(scale, values.dtype), uncertainty + factor_error * np.abs(values)

            yield WrongForm("scaled", f"multiplied by {rounded:g}", scaled)


def _cosine(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Compute the cosine of each pair of rows; 0 for a row of zeros."""
    products = np.einsum("ij,ij->i", first, second)
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return products / np.where(norms == 0, np.inf, norms)


def _other_weights(name: str, actual: np.ndarray, rows: RowIds, source: ModelTensors) -> Iterator[WrongForm]:
    """Yield other weights of the same shape, the nearest first: another layer's, or another matrix of the layer."""
    shape = source.form(name).weight_shape
    distances: dict[str, float] = {}
    for other, form in source.forms.items():
        if other != name and form.weight_shape == shape:
            distances[other] = float(np.linalg.norm(actual - source.read(other, rows)))
    limit = float(np.linalg.norm(actual)) * (1.0 if shape[1] > 1 else 0.1)
    for other in sorted(distances, key=lambda key: distances[key])[:_N_OTHERS]:
        if distances[other] < limit:
            yield WrongForm(f"holds {other}", f"holds the values of {other}", source.expect(other))


def _wrong_rows(
    name: str, actual: np.ndarray, rows: RowIds, source: ModelTensors, report: WeightReport
) -> Iterator[WrongForm]:
    """Yield the form with other rows, if each row is that of the source in another place."""
    match, cosine = _match_rows(actual, name, source)
    if (cosine < _LIKE).any() or (match == rows).all():
        return
    order = np.arange(source.form(name).weight_shape[0])
    order[rows] = match
    moved = [(int(row), int(other)) for row, other in zip(rows, match, strict=True) if row != other]
    yield WrongForm(
        "rows in another order", _describe_order(name, moved, report, source), _reorder(source.expect(name), order)
    )


def _wrong_vector(name: str, file: ModelTensors, source: ModelTensors, report: WeightReport) -> Iterator[WrongForm]:
    """Yield the form with the heads of a bias, or the elements of another vector, in another order."""
    rows = np.arange(source.form(name).weight_shape[0])
    actual, values = file.read(name, rows)[:, 0], source.read(name, rows)[:, 0]
    width = source.config.head_dim if name.endswith(".bias") else 1
    if len(rows) % width:
        return
    heads, source_heads = actual.reshape(-1, width), values.reshape(-1, width)
    order = np.empty(len(heads), int)
    order[np.lexsort(heads.T)] = np.lexsort(source_heads.T)
    order = (order[:, None] * width + np.arange(width)).reshape(-1)
    moved = [(row, other) for row, other in enumerate(order.tolist()) if row != other]
    sentence = _describe_order(name, moved, report, source)
    yield WrongForm("rows in another order", sentence, _reorder(source.expect(name), order))


def _match_rows(actual: np.ndarray, name: str, source: ModelTensors) -> tuple[np.ndarray, np.ndarray]:
    """Find the row of the source that is most alike each row, and its cosine."""
    n_rows, n_columns = source.form(name).weight_shape
    normed = actual / np.maximum(np.linalg.norm(actual, axis=1, keepdims=True), 1e-30)
    best, cosine = np.zeros(len(actual), int), np.full(len(actual), -1.0)
    step = max(1, (1 << 20) // n_columns)
    for start in range(0, n_rows, step):
        values = source.read(name, np.arange(start, min(start + step, n_rows)))
        products = normed @ (values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-30)).T
        index = products.argmax(axis=1)
        largest = products[np.arange(len(actual)), index]
        is_better = largest > cosine
        best[is_better], cosine[is_better] = start + index[is_better], largest[is_better]
    return best, cosine


def _describe_order(name: str, moved: Sequence[tuple[int, int]], report: WeightReport, source: ModelTensors) -> str:
    """Describe which rows stand where: a few rows, experts, heads, a repeated part, or all."""
    wrong_rows = {row for row, _ in report.wrong}
    if len(wrong_rows) <= _FEW_ROWS:
        pairs = ", ".join(f"row {row} holds row {other}" for row, other in moved if row in wrong_rows)
        return f"rows are exchanged: {pairs}"
    offsets = {other - row for row, other in moved}
    if len(offsets) == 1 and report.n_rows > 1:
        first = min(wrong_rows)
        return f"the rows from {first} on repeat the rows from {first + offsets.pop()} on: one part stands for two"
    config = source.config
    widths = {"experts": config.experts.expert_size if config.experts and ".experts." in name else 0}
    if name.endswith("down_proj.weight"):
        widths["experts"] = config.hidden_size if widths["experts"] else 0
    widths["heads"] = config.head_dim if ".self_attn." in name else 0
    for unit, width in widths.items():
        if width and all(row % width == other % width for row, other in moved):
            return f"{unit} are in another order"
    return "the rows are in another order"


def _module_names(names: Sequence[str]) -> str:
    """Join the module names of some weights, each once, without their layers."""
    modules = dict.fromkeys(".".join(part for part in name.split(".") if not part.isdigit()) for name in names)
    shortened = [
        module.removeprefix("model.layers.").removeprefix("model.").removesuffix(".weight") for module in modules
    ]
    return names[0] if len(names) == 1 else f"{', '.join(shortened)} ({len(names)} tensors)"


def _join_exchanges(causes: Sequence[Cause]) -> list[Cause]:
    """Join findings that are one mistake: two matrices exchanged in all layers, or two layers."""
    groups: dict[tuple[str, ...], list[Cause]] = defaultdict(list)
    for cause in causes:
        other = cause.name.removeprefix("holds ") if cause.name.startswith("holds ") else ""
        groups[_exchange(cause.stages[0], other) if other else (cause.name, cause.sentence)].append(cause)
    joined = []
    for key, group in groups.items():
        if len(group) == 1 or key[0] not in ("layers", "modules"):
            joined += group
            continue
        names = tuple(name for cause in group for name in cause.stages)
        first, second = key[1:]
        sentence = f"{first} and {second} are exchanged ({len(names)} tensors)"
        if key[0] == "modules" and not _is_mutual(group):
            sentence = f"{second} stands in place of {first} ({len(names)} tensors)"
        joined.append(Cause(f"exchanged {key[0]}", "mistake", sentence, names, 1.0, 0.0))
    return joined


def _exchange(name: str, other: str) -> tuple[str, ...]:
    """Return the key of an exchange: two layers with the same module, or two modules of one layer."""
    parts, other_parts = name.split("."), other.split(".")
    places = [index for index, part in enumerate(parts) if part.isdigit()]
    if len(parts) != len(other_parts) or not places:
        return (name, other)
    layers = parts[places[0]], other_parts[places[0]]
    if layers[0] != layers[1]:
        return ("layers", *(f"layer {layer}" for layer in sorted(layers, key=int)))
    modules = sorted(
        ".".join(p[places[0] + 1 :]).removesuffix(".weight").removesuffix(".bias") for p in (parts, other_parts)
    )
    return ("modules", *modules)


def _is_mutual(group: Sequence[Cause]) -> bool:
    """Check if each weight of a group holds another one of the group."""
    names = {name for cause in group for name in cause.stages}
    return all(cause.name.removeprefix("holds ") in names for cause in group)
