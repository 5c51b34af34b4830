"""Checkpoints 15 to 20, but for files, on the torch path, against the stored goldens of training."""

from collections.abc import Iterator

from llorch.files import Weights
from llorch.numerics import DtypeName
from llorch.pytorch.device import Target
from llorch.verify.training.goldens import HALF_DTYPES, TrainingGolden
from llorch.verify.training.half import NUMPY_ALONE, HalfTrainingJudge
from llorch.verify.training.judge import TrainingJudge, WideTrainingJudge, stored
from llorch.verify.training.torch_path import TorchPath
from llorch.verify.verifier import Row

VARIANTS = {"": False, "-trainer": True}  # suffix of the backend's name -> whether it runs as the trainer does
DTYPES = ("float32", "float64", *HALF_DTYPES)  # in which training is judged
HALVES: dict[str, DtypeName] = {dtype: dtype for dtype in HALF_DTYPES}
LEFT_OUT = NUMPY_ALONE


def verify_training_torch(name: str, target: Target) -> Iterator[Row]:
    """Judge the torch path on a model against its stored training goldens.

    Args:
        name: In `training_goldens.MODELS`.
        target: Device, and a dtype in `DTYPES`.

    Yields:
        Rows of checkpoints 15 to 20, for each of `VARIANTS`.

    Raises:
        FileNotFoundError: A golden is missing.
        ValueError: The goldens were made for other weights, or the dtype has no tolerances.
    """
    if target.dtype_name not in DTYPES:
        raise ValueError(f"training: judged in {', '.join(DTYPES)}, got {target}; leave it out or choose one of these")
    weights, golden = stored(name)
    yield from torch_rows(judge_for(target.dtype_name, name, weights, golden), target)


def judge_for(dtype: str, name: str, weights: Weights, golden: TrainingGolden) -> TrainingJudge:
    """What judges runs in a dtype."""
    if dtype in HALVES:
        return HalfTrainingJudge(name, weights, golden, HALVES[dtype])
    return (WideTrainingJudge if dtype == "float64" else TrainingJudge)(name, weights, golden)


def torch_rows(judge: TrainingJudge, target: Target) -> Iterator[Row]:
    """The rows of one judge, which knows the dtype of the target; for the rest see `verify_training_torch`."""
    for suffix, as_trainer in VARIANTS.items():
        path = TorchPath(judge.weights, judge.golden, target, as_trainer=as_trainer)
        ours = {"isolated": dict(path.isolated()), "chained": dict(path.chained())}
        yield from judge.rows(f"{target}{suffix}", ours, left_out=LEFT_OUT)
