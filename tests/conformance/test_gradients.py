"""Loss and gradients against PEFT in float64, through transformers' unmodified modules, for all that PEFT trains."""

from pathlib import Path

import numpy as np
import pytest
from builders.families import labelled, random_folder
from builders.family_adapters import family_adapter, float64_peft, gradients_of

from llorch.files import open_weights
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import Adapter
from llorch.lora.base import identity_of
from llorch.lora.peft_format import read_peft, write_peft
from llorch.training.numpy_step import of_document

pytestmark = pytest.mark.live

KINDS = labelled("gradients")
RELATIVE = 1e-12
FACTOR = 4  # times what PEFT is off from itself when its attention adds in another order


def of_peft(base: Path, folder: Path, adapter: Adapter, ids: np.ndarray, attention: str) -> tuple[float, dict]:
    """Loss and gradients, by our names, of PEFT in float64."""
    import torch

    from llorch.engines.float64_everywhere import float64_everywhere

    model, given = float64_peft(base, folder, attention), torch.from_numpy(ids)[None]
    with float64_everywhere(refuse=False):
        loss = torch.nn.functional.cross_entropy(model(input_ids=given).logits[0, :-1], given[0, 1:])
        loss.backward()
    return loss.item(), gradients_of(model, adapter)


@pytest.mark.nightly_cases(but=["qwen2"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_of_every_tensor_are_those_of_peft_on_our_file(kind: str, tmp_path: Path, rng):
    family, own = KINDS[kind]
    base = random_folder(family, tmp_path / "base", 0, **own)
    weights = open_weights(base).astype(np.float64, keep=True)
    adapter = family_adapter(weights.config)
    write_peft(adapter, tmp_path / "adapter", base=identity_of(weights))
    again = read_peft(tmp_path / "adapter", weights.config)
    assert {name: array.tobytes() for name, array in again.flat().items()} == {
        name: array.tobytes() for name, array in adapter.flat().items()
    }
    ids = rng.integers(0, weights.config.vocab_size, 70)
    (expected, gradients), (_, others) = (
        of_peft(base, tmp_path / "adapter", again, ids, how) for how in ("eager", "sdpa")
    )
    adapted, wanted = AdaptedWeights(weights, again), np.append(ids[1:], -100)
    loss, grads = of_document(ids, wanted, adapted, label_smoothing=0.0, n_trained=69)
    assert loss / 69 == pytest.approx(expected, rel=RELATIVE)
    for name, theirs in gradients.items():
        limit = max(RELATIVE * np.abs(theirs).max(), FACTOR * np.abs(theirs - others[name]).max())
        np.testing.assert_allclose(grads[name], theirs, rtol=0, atol=limit, strict=True, err_msg=name)
