"""The table of fault injection: every fault stands in it, and each part of a check can fail."""

from dataclasses import replace
from pathlib import Path

import pytest
from faults import fault as faults
from faults import table
from faults.fault import Check, InjectedFault, assert_seen
from faults.into_numpy import FAULTS

from llorch.judging.types import Comparison
from llorch.stages.comparison import FAIL, PASS, TIE, Difference, Tolerance
from llorch.stages.stage_ref import StageRef

ROWS = (*table.NUMPY, *table.FLOAT64, *table.PACKED, *table.TORCH, *table.LIVE, *table.TORCH_TRAINING)
RIGHT = Comparison(
    "m", StageRef("05", "ffn_act", 0), "isolated", "llamacpp", "numpy", Difference(1, 1), Tolerance(1, 1), PASS
)
RED = replace(RIGHT, verdict=FAIL, difference=Difference(20, 1), stage_ref=StageRef("01", "attn_norm", 0))
SEEN = Check(
    ("01", "attn_norm", 0), "isolated", factor=10, engines=frozenset({"llamacpp"}), red={"isolated": {"attn_norm"}},
    by=10, some=("isolated", "attn_norm"), every=("isolated", "attn_norm"), over={("isolated", "attn_norm"): 10},
    only_in=frozenset({"isolated"}), cases=frozenset({"near"}), others=frozenset({PASS}),
)  # fmt: skip


def test_every_fault_stands_in_the_table():
    from faults import into_torch, into_training

    def faults_for(start: str) -> set[str]:
        return {row.name for row in ROWS if row.backend.startswith(start)}

    assert faults_for("numpy") == {*FAULTS, *table.OPS}
    assert faults_for("torch") == into_torch.FAULTS.keys()
    assert faults_for("training-torch") == into_training.IN_TORCH.keys()


def require(check: Check, *rows: Comparison) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "resolve_name", lambda _: lambda *_: rows)
        assert_seen(InjectedFault("f", "numpy", "m", check), patch, Path())


def test_a_fault_that_is_seen_passes():
    require(SEEN, RED, RIGHT)
    require(table.ALL_RIGHT, RIGHT)


@pytest.mark.parametrize(
    ("check", "comparisons"),
    [
        pytest.param(SEEN, (), id="nothing was compared"),
        pytest.param(SEEN, (RIGHT,), id="nothing fails"),
        pytest.param(Check(), (RED,), id="something fails in a right run"),
        pytest.param(Check(("01", "ffn_norm")), (RED,), id="first at another stage"),
        pytest.param(Check(("01", "attn_norm", 1)), (RED,), id="first in another layer"),
        pytest.param(Check(("01",), factor=30), (RED,), id="by too little"),
        pytest.param(Check(("01",), factor=10, engines=frozenset({"transformers"})), (RED,), id="not by both engines"),
        pytest.param(Check(red={"isolated": ()}), (RED,), id="red where it must not be"),
        pytest.param(Check(red={"": {"attn_norm"}}, by=30), (RED,), id="red by too little"),
        pytest.param(Check(some=("decode", "attn_norm")), (RED,), id="red in another mode"),
        pytest.param(Check(every=("isolated", "attn_norm")), (RED, replace(RED, verdict=PASS)), id="not every one"),
        pytest.param(Check(over={("", "attn_norm"): 30}), (RED,), id="over the tolerance by too little"),
        pytest.param(Check(only_in=frozenset({"decode"})), (RED,), id="in a mode where all is right"),
        pytest.param(Check(cases=frozenset({"far"})), (RED,), id="not in its case"),
        pytest.param(replace(SEEN), (RED, replace(RIGHT, verdict=TIE)), id="another verdict beside it"),
    ],
)
def test_each_part_of_a_check_can_fail(check: Check, comparisons: tuple[Comparison, ...]):
    with pytest.raises(AssertionError):
        require(check, *comparisons)
