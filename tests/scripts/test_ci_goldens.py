"""The commands of `.ci/goldens.py`: every model at night, five by day, and every model on some day."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from llorch.judging.goldens.training import MODELS as TRAINED
from llorch.runtime.builtin import EVERY


@pytest.fixture(scope="module")
def goldens() -> ModuleType:
    spec = spec_from_file_location("ci_goldens", Path(__file__).parents[2] / ".ci/goldens.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_night_has_every_model(goldens: ModuleType):
    assert goldens.chosen("nightly", "0") == ("quantised", *EVERY)


def test_a_day_has_four_models_and_one_that_is_drawn(goldens: ModuleType):
    days = [goldens.chosen("day", f"{tree:040x}") for tree in range(len(EVERY))]
    assert all(day[:5] == ("quantised", *goldens.ALWAYS) and len({*day}) == 6 for day in days)
    assert {name for day in days for name in day} == {"quantised", *EVERY}


@pytest.mark.parametrize(("extent", "dtypes"), [("day", 1), ("nightly", 3)])
def test_each_chosen_model_is_made_again_and_judged_in_each_dtype_of_torch(
    goldens: ModuleType, extent: str, dtypes: int
):
    names, lines = goldens.chosen(extent, "3"), goldens.commands(extent, "3")
    made, judged = ([line.split() for line in lines if word in line] for word in ("regenerate.py", "--backend torch"))
    for name in names:
        assert sum(name in line for line in made) == 1
        assert sum(name in line for line in judged) == dtypes
    assert len(lines) == len(made) + dtypes
    assert all(line[:3] == ["python", "reference_outputs/regenerate.py", "--check"] for line in made)


def test_torch_is_judged_in_both_dtypes_on_some_day(goldens: ModuleType):
    lines = {line for tree in range(2 * len(EVERY)) for line in goldens.commands("day", f"{tree:040x}")}
    assert {line.split()[-1] for line in lines if "--dtype" in line} == {"float32", "bfloat16"}


def test_a_model_with_goldens_of_training_has_a_process_of_its_own(goldens: ModuleType):
    made = [line.split()[3:] for line in goldens.commands("nightly", "0") if "regenerate.py" in line]
    assert sorted(map(len, made)) == [1] * len(TRAINED) + [1 + len(EVERY) - len(TRAINED)]
    assert {*TRAINED} == {name for names in made[:-1] for name in names}
