"""The commands of `.ci/goldens.py`: every model at night, five by day."""

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


@pytest.mark.parametrize(("extent", "n_models", "n_dtypes"), [("day", 5, 1), ("nightly", len(EVERY), 3)])
def test_each_model_is_made_again_and_checked_in_each_dtype_of_torch(
    goldens: ModuleType, extent: str, n_models: int, n_dtypes: int
):
    lines = goldens.commands(extent)
    made = [line.split()[3:] for line in lines if line.startswith("python reference_outputs/regenerate.py --check ")]
    verified = [line.split()[2:-4] for line in lines if line.split()[-4:-1] == ["--backend", "torch", "--dtype"]]
    names = [name for models in made for name in models]
    assert {*names} <= {"quantised", *EVERY}
    assert len(names) == len({*names}) == n_models + 1
    assert [sorted(models) for models in verified] == [sorted(names)] * n_dtypes
    assert len(lines) == len(made) + n_dtypes


def test_a_model_with_goldens_of_training_has_a_process_of_its_own(goldens: ModuleType):
    made = [line.split()[3:] for line in goldens.commands("nightly") if "regenerate.py" in line]
    assert sorted(map(len, made)) == [1] * len(TRAINED) + [1 + len(EVERY) - len(TRAINED)]
    assert {*TRAINED} == {name for names in made[:-1] for name in names}
