"""Training dumps of a trainer that shares no code with ours: the first wrong quantity, its mistake and its number."""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.refusals import assert_tells
from helpers.without_gaps import without_gaps

from benchmarks.diagnosis.training_bugs import BUGS
from benchmarks.diagnosis.training_cases import TrainingCase, TrainingScore, score, written
from llorch.diagnosis.training.diagnose import diagnose_training
from llorch.diagnosis.verdict import Diagnosis
from llorch.engines.dumps.index import open_raw
from llorch.files import open_weights
from llorch.judging.goldens.training_recipe import make_adapter
from llorch.runtime.builtin import builtin_path

BY_NAME, SLOW = {bug.name: bug for bug in BUGS}, pytest.mark.slow


@cache
def scored(name: str, style: str = "whole") -> TrainingScore:
    with without_gaps():
        return score(TrainingCase(BY_NAME.get(name), "micro-qwen3", style))


@pytest.mark.slow_cases("max-norm-0.5-whole")
@pytest.mark.parametrize(
    ("name", "style"),
    [
        pytest.param("scale-squared", "whole", marks=SLOW),
        pytest.param("not-shifted", "whole", marks=SLOW),
        pytest.param("smoothing-0.2", "whole", marks=SLOW),
        pytest.param("norm-detached", "usual", marks=SLOW),
        ("max-norm-0.5", "whole"),  # of which the first step alone looks like betas swapped
        ("step-late", "usual"),
        ("eps-inside", "whole"),
        pytest.param("heads-not-summed", "whole", marks=pytest.mark.nightly),  # two at once
    ],
)
def test_a_bug_is_found_where_it_is_made_and_named(name: str, style: str):
    found = scored(name, style)
    assert (found.stage, found.is_named, len(found.wrong)) == (True, True, 1), found.diagnosis.findings
    assert found.wrong[0].kind == "mistake"
    assert min(one.explained_share for one in found.wrong[0].causes) > 0.99


@pytest.mark.nightly_cases(but=["sign-of-momentum"])
@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("one-gradient-doubled", marks=SLOW), "sign-of-momentum"])
def test_what_no_known_mistake_makes_is_said_to_be_none_of_them_once(name: str):
    found = scored(name)
    assert (found.stage, found.is_named, [one.kind for one in found.wrong]) == (True, True, ["unknown"])
    assert found.wrong[0].causes == ()
    assert_tells(found.wrong[0].sentence, "step", found.wrong[0].key)


@SLOW
def test_an_unknown_gradient_is_told_by_its_tensor_and_what_it_came_through():
    (finding,) = scored("one-gradient-doubled").wrong
    assert (finding.key, finding.layers, finding.starts_in) == ("l1.gradient.v_proj.lora_A", (1,), ("l1.attn_context",))
    assert finding.places == ((1, finding.key), (2, finding.key))


@pytest.mark.slow_cases("whole")
@pytest.mark.parametrize("style", ["whole", "usual", pytest.param("unclear", marks=SLOW)])
def test_a_right_trainer_is_accused_of_nothing(style: str):
    found = scored("right", style).diagnosis
    assert found.is_right
    assert found.findings == []
    assert {result.verdict for result in found.results} == {"PASS"}


def diagnosed(
    tmp_path: Path, change: Mapping[str, Any], *, name: str = "right", dtype: str = "", gaps: bool = False
) -> Diagnosis:
    """Diagnose the usual dump of a run with some arrays changed; None takes one out.

    A dump that says that it is of float32 is not searched again for errors of bfloat16.
    """
    path = TrainingCase(BY_NAME.get(name), "micro-qwen3", "usual").write(tmp_path)
    arrays = {**np.load(path), **change}
    kept = {name: np.asarray(array) for name, array in arrays.items() if array is not None}
    path = written(kept, tmp_path / "changed", "whole" if dtype else "usual", dtype)
    weights = open_weights(builtin_path("micro-qwen3"))
    adapter = make_adapter(weights.config)
    with nullcontext() if gaps else without_gaps():
        return diagnose_training(weights, adapter, open_raw(path))


def removed_arrays(folder: Path, kinds: tuple[str, ...]) -> dict[str, None]:
    """Of the usual dump what is not of these kinds, to be taken out."""
    names = np.load(TrainingCase(None, "micro-qwen3", "usual").write(folder))
    return {name: None for name in names if name.startswith("step") and not any(f".{kind}" in name for kind in kinds)}


@SLOW
def test_training_dump_of_only_losses_and_parameters_is_diagnosed(tmp_path: Path):
    out = removed_arrays(tmp_path, ("input_ids", "labels", "attention_mask", "loss", "param."))
    right = diagnosed(tmp_path, out)
    assert (right.findings, len(right.results)) == ([], 2 + 2 * 28)
    wrong = diagnosed(tmp_path, out, name="sign-of-momentum")
    assert [(one.kind, one.key) for one in wrong.findings] == [("unknown", "l1.parameters.down_proj.lora_A")]


@SLOW
def test_a_setting_that_the_dump_does_not_say_is_recovered_and_no_mistake(tmp_path: Path):
    found = diagnosed(tmp_path, {"lr": None})
    assert found.is_right
    (finding,) = found.findings
    assert (finding.kind, finding.causes[0].value) == ("rounding", "0.002")
    assert_tells(finding.sentence, "0.002", "dump")


def test_numbers_that_are_none_are_told_before_anything_else(tmp_path: Path):
    found = diagnosed(tmp_path, {"step1.loss": np.nan})
    assert [(one.kind, one.key, one.n_pass) for one in found.findings] == [("not finite", "loss", 1)]


@SLOW
def test_a_second_bug_behind_the_first_is_found_in_the_same_run(tmp_path: Path):
    found = diagnosed(tmp_path, {"step1.loss": 1.0}, name="eps-inside", dtype="float32").findings
    assert [(one.kind, one.key) for one in found] == [("unknown", "loss"), ("mistake", found[1].key)]
    assert found[1].causes[0].name == "adamw-eps-inside-root"


@pytest.mark.parametrize("style", ["usual", pytest.param("whole", marks=SLOW)])
def test_it_says_what_the_dump_could_not_have_shown(style: str):
    hidden = score(TrainingCase(None, "micro-qwen3", style)).diagnosis.could_not_show
    by_name = {name: reason for reason, names in hidden.items() for name in names}
    assert_tells(by_name["merge-twice"], "merge")
    assert_tells(by_name["lora-rslora-ignored"], "rank-stabilised")
    assert_tells(by_name["packed-documents-see-each-other"], "document_ids", "cu_seqlens")
    shown = {"adamw-step-counted-late", "clip-ignored", "lora-scaled-twice", "loss-prompt-not-masked"}
    assert not shown & by_name.keys()


@SLOW
def test_it_says_what_a_smaller_dump_could_not_have_shown(tmp_path: Path):
    names = np.load(TrainingCase(None, "micro-qwen3", "usual").write(tmp_path))
    first_alone = {name: None for name in names if "step2" in name}
    less = diagnosed(tmp_path, first_alone | {"weight_decay": 0.0, "label_smoothing": 0.0}, gaps=True).could_not_show
    by_name = {name: reason for reason, names in less.items() for name in names}
    assert_tells(by_name["adamw-step-counted-late"], "first step")
    assert_tells(by_name["adamw-decay-missing"], "weight decay")
    assert_tells(by_name["loss-smoothing-missing"], "labels", "smoothed")
