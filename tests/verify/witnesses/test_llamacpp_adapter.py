"""llama.cpp with a LoRA adapter: what it computes, what it refuses, and that the base stays as it is."""

import numpy as np
import pytest
from random_adapters import IDS, random_adapter, tiny_base

from llorch.files import open_weights
from llorch.lora.gguf_format import write_lora_gguf

pytestmark = pytest.mark.live


@pytest.fixture
def made(tmp_path):
    base = tiny_base(tmp_path / "base")
    config = open_weights(base).config
    write_lora_gguf(random_adapter(config), tmp_path / "a.gguf", config)
    return base, tmp_path / "a.gguf", config


def test_the_adapter_acts_on_every_run_and_on_its_stages(made):
    from llorch.verify.witnesses.llamacpp import LlamaCpp
    from llorch.verify.witnesses.llamacpp_adapter import LlamaCppWithAdapter

    base, adapter, _ = made
    with LlamaCpp(base) as plain, LlamaCppWithAdapter(base, adapter) as adapted:
        logits = adapted.logits(IDS)
        assert np.abs(logits - plain.logits(IDS)).max() > 0.1
        np.testing.assert_allclose(adapted.selected_logits(IDS), logits[-1], rtol=0, atol=1e-6)
        assert adapted.greedy(IDS, 3) != plain.greedy(IDS, 3)


def test_a_zero_adapter_gives_the_bits_of_the_base(made, tmp_path):
    from llorch.verify.witnesses.llamacpp import LlamaCpp
    from llorch.verify.witnesses.llamacpp_adapter import logits_with_adapter

    base, _, config = made
    adapter = random_adapter(config)
    for lora in adapter.tensors.values():
        lora.lora_B[:] = 0
    write_lora_gguf(adapter, tmp_path / "zero.gguf", config)
    with LlamaCpp(base) as plain:
        np.testing.assert_array_equal(logits_with_adapter(base, tmp_path / "zero.gguf", IDS), plain.logits(IDS))


def test_what_llamacpp_refuses_is_an_error_with_its_words(made, tmp_path):
    from llorch.verify.witnesses.llamacpp_adapter import logits_with_adapter

    base, adapter, _ = made
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(adapter.read_bytes()[:200])
    with pytest.raises(OSError, match="cannot load the adapter"):
        logits_with_adapter(base, cut, IDS)
    with pytest.raises(OSError, match="cannot load the adapter"):
        logits_with_adapter("llorch/models/micro-qwen3.gguf", adapter, IDS)
