"""Loss and gradients against PEFT in float64, through transformers' unmodified modules, for all that PEFT trains."""

from pathlib import Path

import numpy as np
import pytest
from families import random_folder
from family_adapters import family_adapter, float64_peft, gradients_of

from llorch.files import open_weights
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.base import identity_of
from llorch.lora.peft_format import read_peft, write_peft
from llorch.train.numpy_step import of_document

pytestmark = pytest.mark.live

KINDS = {
    "qwen2_moe": {}, "qwen2_moe normalised": {"norm_topk_prob": True}, "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen3_next": {}, "qwen3_5": {}, "qwen3_5_moe": {}, "mistral": {"sliding_window": 9}, "smollm3": {},
    "ministral3": {}, "llama4": {}, "qwen2_5_vl": {}, "qwen3_vl": {},
}  # fmt: skip
RELATIVE = 1e-12
WIDER = {"qwen3_vl": 3e-12}  # rounding: of six seeds 2e-14 to 1.6e-12, this one the most


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_of_every_tensor_are_those_of_peft_on_our_file(kind: str, tmp_path: Path, rng):
    import torch

    from llorch.verify.witnesses.float64_everywhere import float64_everywhere

    base = random_folder(kind.split()[0], tmp_path / "base", 0, **KINDS[kind])
    weights = open_weights(base).astype(np.float64, keep=True)
    adapter = family_adapter(weights.config)
    write_peft(adapter, tmp_path / "adapter", base=identity_of(weights))
    again = read_peft(tmp_path / "adapter", weights.config)
    assert {name: array.tobytes() for name, array in again.flat().items()} == {
        name: array.tobytes() for name, array in adapter.flat().items()
    }
    ids = rng.integers(0, weights.config.vocab_size, 70)
    model, given = float64_peft(base, tmp_path / "adapter"), torch.from_numpy(ids)[None]
    with float64_everywhere(refuse=False):
        want = torch.nn.functional.cross_entropy(model(input_ids=given).logits[0, :-1], given[0, 1:])
        want.backward()
    adapted, wanted = AdaptedWeights(weights, again), np.append(ids[1:], -100)
    loss, grads = of_document(ids, wanted, adapted, label_smoothing=0.0, n_trained=69)
    assert loss / 69 == pytest.approx(want.item(), rel=RELATIVE)
    for name, theirs in gradients_of(model, again).items():
        limit = WIDER.get(kind, RELATIVE) * np.abs(theirs).max()
        np.testing.assert_allclose(grads[name], theirs, rtol=0, atol=limit, strict=True, err_msg=name)
