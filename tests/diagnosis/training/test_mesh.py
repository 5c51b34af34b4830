"""Mistakes of training on several ranks, made by ranks and named from what they wrote down."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from helpers.mesh_training import second_step
from helpers.refusals import assert_tells
from helpers.training_runs import small_settings
from helpers.without_gaps import without_gaps

from llorch.diagnosis.training.diagnose import diagnose_training
from llorch.diagnosis.verdict import Diagnosis
from llorch.engines.dumps.index import open_raw
from llorch.files import open_weights
from llorch.lora.initial import initial_adapter
from llorch.pytorch.distributed.launch import on_ranks
from llorch.runtime.builtin import builtin_path

pytestmark = pytest.mark.usefixtures("warm_ranks")

SLOW = pytest.mark.slow
MODEL = "micro-llama"


def diagnosed(folder: Path, axes: Mapping[str, int], fault: str) -> Diagnosis:
    settings = small_settings(folder, model=MODEL, dtype="float64", batch_size=8, max_grad_norm=0.5)
    arrays = on_ranks(axes["dp"] * axes["tp"], second_step, settings, axes, fault)
    path = folder / "dump.npz"
    np.savez(path, max_grad_norm=np.asarray(0.5), weight_decay=np.asarray(0.0), **arrays)
    weights = open_weights(builtin_path(MODEL))
    adapter = initial_adapter(settings.lora, weights, init="default", seed=settings.seed)
    with without_gaps():
        return diagnose_training(weights, adapter, open_raw(path))


@pytest.mark.nightly_cases(but=["counted twice-*"])
@pytest.mark.parametrize(
    ("fault", "axes", "name", "fact"),
    [
        pytest.param("attached late", {"dp": 2, "tp": 1}, "mesh-gradient-not-summed", "rank 0", marks=SLOW),
        pytest.param("unsummed factor", {"dp": 1, "tp": 2}, "mesh-replicated-factor-not-summed", "rank 0", marks=SLOW),
        pytest.param("averaged", {"dp": 2, "tp": 1}, "mesh-divided-by-world-size", "2 ranks", marks=SLOW),
        pytest.param("counted twice", {"dp": 2, "tp": 1}, "mesh-norm-counts-copies", "2 times", marks=SLOW),
        pytest.param("mean of means", {"dp": 2, "tp": 1}, "mesh-mean-of-rank-means", "2 ranks", marks=SLOW),
        pytest.param("mean of means", {"dp": 4, "tp": 1}, "mesh-mean-of-rank-means", "4 ranks", marks=SLOW),
    ],
)
def test_a_mistake_of_several_ranks_has_its_name(
    tmp_path: Path, fault: str, axes: Mapping[str, int], name: str, fact: str
):
    finding, *others = diagnosed(tmp_path, axes, fault).findings
    assert finding.suspects[0].name == name
    assert_tells(finding.sentence, fact)
    assert [one.key for one in others] == (  # ranks with gradients of their own clip by norms of their own
        ["l2.clipped.down_proj.lora_A"] if fault == "unsummed factor" else []
    )


@SLOW
def test_ranks_that_make_no_mistake_are_accused_of_nothing(tmp_path: Path):
    found = diagnosed(tmp_path, {"dp": 2, "tp": 2}, "")
    assert found.is_right
    assert found.findings == []
