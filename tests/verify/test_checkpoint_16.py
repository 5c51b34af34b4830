"""Checkpoint 16: which tokens are learned and what each costs, against the goldens of PEFT and torch."""

import numpy as np
import pytest
from planted_training import training_golden_of
from training_rows import ON_CUDA, backends, places, require_all

from llorch.train.batch import IGNORED
from llorch.verify.training.goldens import MODELS


@pytest.mark.parametrize(("backend", "model"), places("16"))
def test_checkpoint(backend: str, model: str):
    require_all("16", backend, model)


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", backends("16", ON_CUDA))
def test_checkpoint_16_on_cuda(backend: str, model: str):
    require_all("16", backend, model)


@pytest.mark.parametrize("model", MODELS)
def test_checkpoint_16_has_batches_that_show_mistakes(model: str):
    golden = training_golden_of(model)
    first = golden.batches[0]
    assert len({len(row) for row in golden.rows[0].ids}) == 2  # so there is padding
    assert all(prompt > 1 for prompt in golden.rows[0].prompts)  # and there are prompts that are not learned
    assert len({*first.ids[first.documents >= 0].tolist()}) >= 8
    n_trained = [batch.n_trained for batch in golden.batches]
    assert len({*n_trained}) > 1  # so a mean of means is another number
    each = golden.arrays["peft/plain/token_losses"]
    assert len(each) == n_trained[0] == int((first.labels != IGNORED).sum())


@pytest.mark.parametrize("model", MODELS)
def test_checkpoint_16_golden_loss_is_the_mean_of_its_token_losses(model: str):
    arrays = training_golden_of(model).arrays
    for case in ("plain", "smoothed"):
        np.testing.assert_allclose(arrays[f"peft/{case}/loss"], arrays[f"peft/{case}/token_losses"].mean(), rtol=1e-6)
    assert arrays["peft/plain/loss"] != arrays["peft/smoothed/loss"]
