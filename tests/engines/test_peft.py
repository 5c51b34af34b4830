"""Logits of an adapter in PEFT, on a folder and on a GGUF base."""

import numpy as np
import pytest
import safetensors.numpy as container
from builders.random_adapters import IDS, adapted_logits, random_adapter, tiny_base

from llorch.files import open_weights
from llorch.files.export import write_gguf
from llorch.lora.base import identity_of
from llorch.lora.peft_format import write_peft

pytestmark = pytest.mark.live


@pytest.fixture
def made(tmp_path):
    base = tiny_base(tmp_path / "base")
    weights = open_weights(base)
    adapter = random_adapter(weights.config)
    write_peft(adapter, tmp_path / "adapter", base=identity_of(weights))
    return base, tmp_path / "adapter", adapter


def test_a_gguf_base_serves_as_well_as_a_folder(made, tmp_path):
    from llorch.engines.peft import peft_logits

    base, folder, adapter = made
    write_gguf(open_weights(base), tmp_path / "base.gguf")
    for model in (base, tmp_path / "base.gguf"):
        expected = adapted_logits(base, adapter)
        np.testing.assert_allclose(
            peft_logits(model, folder, IDS), expected, rtol=0, atol=2e-6 * np.abs(expected).max()
        )


def test_keys_that_fit_nothing_are_an_error_where_peft_only_warns(made):
    from llorch.engines.peft import peft_logits

    base, folder, _ = made
    path = folder / "adapter_model.safetensors"
    tensors = {name.replace("q_proj", "query"): array for name, array in container.load_file(path).items()}
    container.save_file(tensors, path, {"format": "pt"})
    with pytest.raises(RuntimeError, match="missing adapter keys"):
        peft_logits(base, folder, IDS)
