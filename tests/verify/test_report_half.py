"""The generated parts of the page of checkpoint 14."""

from dataclasses import replace

import pytest
from planted import MICRO, golden_of

from llorch.verify.compare import Tolerance
from llorch.verify.goldens import Golden
from llorch.verify.report.half import distances, ladder, teeth
from llorch.verify.verifier import Row, exact_row

NAME = "micro-llama"


@pytest.fixture
def golden() -> Golden:
    return golden_of(NAME)


def cells(markdown: str, first: str) -> list[str]:
    (line,) = [line for line in markdown.splitlines() if line.startswith(f"| {first} |")]
    return line.strip("| ").split(" | ")[1:]


def with_error(golden: Golden, dtype: str, producer: str, stage: str, error: float) -> Golden:
    errors = {d: {p: dict(cases) for p, cases in of.items()} for d, of in golden.half_errors.items()}
    far = errors[dtype][producer]["far"]
    errors[dtype][producer]["far"] = far | {"isolated": far["isolated"] | {stage: error}}
    return replace(golden, half_errors=errors)


@pytest.mark.parametrize(
    ("dtype", "producer", "column"),
    [("bfloat16", "llamacpp", 0), ("bfloat16", "transformers", 1), ("float16", "llamacpp", 3)],
)
def test_a_line_shows_the_largest_distance_of_all_models_and_cases(
    golden: Golden, dtype: str, producer: str, column: int
):
    goldens = {"one": golden, "two": with_error(golden, dtype, producer, "ffn_up", 0.75), "three": golden}
    before, after = (cells(distances(g, "isolated"), "`ffn_up`") for g in ({"one": golden}, goldens))
    assert after[column] == "7.5e-01"
    assert [c for i, c in enumerate(after) if i != column] == [c for i, c in enumerate(before) if i != column]


def test_tolerances_stand_beside_the_distances(golden: Golden):
    line = cells(distances({NAME: golden}, "chained"), "`logits`")
    for column, dtype in ((2, "bfloat16"), (5, "float16")):
        largest = max(made["chained"]["logits"].error for made in golden.half_tolerances[dtype].values())
        assert line[column] == f"{largest:.1e}"


def test_a_ladder_has_a_rung_for_every_layer_and_a_column_for_every_run(golden: Golden):
    def row(stage: str, layer: int | None, producer: str, error: float, case: str = "near") -> Row:
        made = exact_row(NAME, "07", stage, producer, 0.0, "")
        return replace(made, layer=layer, mode="chained", case=case, producer_error=error)

    rows = [
        row("block_out", i, p, 1e-7 * (i + 1) + 1e-8 * len(p)) for i in (0, 1) for p in ("llamacpp", "transformers")
    ]
    rows += [row("block_out", 0, "llamacpp", 9.0, "far"), row("ffn_out", 0, "llamacpp", 9.0)]
    made = ladder(golden, rows)
    assert len(made.splitlines()) == 4
    stored = golden.half_errors["float16"]["transformers"]["near"]["chained"]["l1.block_out"]
    line = cells(made, "`l1.block_out`")
    assert line[:2] == ["2.8e-07", "3.2e-07"]
    assert line[5] == f"{stored:.1e}"


def test_wider_tolerances_show_fewer_mistakes_and_name_those_not_seen():
    lines = teeth({name: golden_of(name) for name in MICRO})
    numbers = {dtype: cells(lines, dtype) for dtype in ("float32", "bfloat16", "float16")}
    assert numbers["float32"][0] == numbers["float32"][1] == numbers["float32"][2]
    assert numbers["float32"][3] == "none"
    for dtype in ("bfloat16", "float16"):
        total, far_over, over = (int(cell) for cell in numbers[dtype][:3])
        assert far_over <= over < total
        assert len(numbers[dtype][3].split(", ")) == total - over


def test_a_tolerance_that_lets_everything_pass_sees_nothing():
    goldens = {}
    for name in MICRO:
        golden = golden_of(name)
        lax = {
            case: {mode: dict.fromkeys(stages, Tolerance(1e9, 1e9)) for mode, stages in modes.items()}
            for case, modes in golden.half_tolerances["float16"].items()
        }
        goldens[name] = replace(golden, half_tolerances={**golden.half_tolerances, "float16": lax})
    line = cells(teeth(goldens), "float16")
    assert int(line[2]) <= 10  # those whose mask or shape is another, or that are no numbers
