"""PEFT on whole models, which see, too: what we write it loads, what it writes we load."""

from pathlib import Path

import numpy as np
import pytest
from builders.families import WHOLE, WITH_TEXT_CLASS, random_folder
from builders.family_adapters import family_adapter
from builders.random_adapters import (
    adapted_logits,
    peft_model,
    plain_logits,
    random_adapter,
    save_quietly,
    torch_logits,
)
from helpers.refusals import refuses

from llorch.apps.doctor.adapter import examine
from llorch.families.table import FAMILIES as TABLE
from llorch.files import open_weights
from llorch.files.convert import convert
from llorch.lora.base import identity_of
from llorch.lora.export import export
from llorch.lora.gguf_format import write_lora_gguf
from llorch.lora.peft_format import OF_WHOLE, has_multimodal_names, read_peft, write_peft

pytestmark = [
    pytest.mark.live,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing"),
    pytest.mark.filterwarnings("ignore:.*rank_pattern keys did not match any targeted module"),  # of parameters they do
    pytest.mark.filterwarnings("ignore:.*alpha_pattern keys did not match any targeted module"),
    pytest.mark.filterwarnings("error:Found missing adapter keys"),
]
EXPERTS = {family: ["experts.gate_up_proj", "experts.down_proj"] for family in WHOLE if TABLE[family].router}
KINDS = {  # of target_modules that PEFT takes, fitting the text part alone
    "regex": r".*language_model\..*\.(q_proj|o_proj|in_proj_z|up_proj)",
    "list": ["language_model.layers.1.mlp.up_proj", "language_model.layers.0.mlp.down_proj", "lm_head"],
}


@pytest.fixture(params=WHOLE)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def base(family: str, tmp_path: Path) -> Path:
    return random_folder(family, tmp_path / "base", 0, nested=True)


def assert_close_logits(actual: np.ndarray, expected: np.ndarray, base_logits: np.ndarray) -> None:
    assert np.abs(expected - base_logits).max() > 0.1 * expected.std()  # the adapter does something
    assert np.abs(actual - expected).max() < 1e-4 * expected.std()  # both in float32


def test_peft_computes_the_logits_of_llorch_from_a_folder_of_llorch(base: Path, tmp_path: Path):
    weights = open_weights(base)
    adapter = family_adapter(weights.config)
    write_peft(adapter, tmp_path / "adapter", base=identity_of(weights))
    model = peft_model(base, tmp_path / "adapter", multimodal=True)
    assert_close_logits(torch_logits(model), adapted_logits(base, adapter), plain_logits(base))
    assert all("language_model" in name for name, _ in model.named_parameters() if "lora_" in name)


@pytest.mark.parametrize("modules", [("embed_tokens", "q_proj"), ("lm_head", "o_proj")])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llama4"], indirect=True)
def test_embedding_and_output_adapters_use_the_text_part(base: Path, tmp_path: Path, modules: tuple[str, ...]):
    weights = open_weights(base)
    adapter = random_adapter(weights.config, target_modules=modules, use_dora=True)
    write_peft(adapter, tmp_path / "adapter", base=identity_of(weights))
    model = peft_model(base, tmp_path / "adapter", multimodal=True)
    assert_close_logits(torch_logits(model), adapted_logits(base, adapter), plain_logits(base))
    again = read_peft(save_quietly(model, tmp_path / "saved"), weights.config)
    assert_close_logits(adapted_logits(base, again), torch_logits(model), plain_logits(base))


@pytest.mark.parametrize("kind", KINDS)
def test_llorch_computes_the_logits_of_peft_from_a_folder_of_peft(base: Path, tmp_path: Path, family, kind):
    modules = KINDS[kind]
    if family == "llama4" and isinstance(modules, list):
        modules = [name.replace("language_model.", "language_model.model.") for name in modules]
        modules = [name.replace("mlp.up", "self_attn.q").replace("mlp", "feed_forward") for name in modules]
    if family == "qwen3_5_moe" and isinstance(modules, list):
        modules = [name.replace("mlp.", "mlp.shared_expert.") for name in modules]
    settings = {"target_modules": modules, "target_parameters": EXPERTS.get(family)}
    settings |= {"rank_pattern": {r"language_model.*\.up_proj": 5}, "alpha_pattern": {"down_proj": 11.0}}
    model = peft_model(base, multimodal=True, r=3, lora_alpha=5, **settings)
    adapter = read_peft(save_quietly(model, tmp_path / "adapter"), open_weights(base).config)
    assert_close_logits(adapted_logits(base, adapter), torch_logits(model), plain_logits(base))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llama4"], indirect=True)
def test_peft_targets_by_bare_name_include_vision_and_are_refused(base: Path, tmp_path: Path):
    model = peft_model(base, multimodal=True, r=3, target_modules=["q_proj", "up_proj"])
    folder = save_quietly(model, tmp_path / "adapter")
    with refuses("Unsupported", expected="text", got="vision", where=folder):
        read_peft(folder, open_weights(base).config)
    merged = save_quietly(model.merge_and_unload(), tmp_path / "merged")  # the remedy
    assert_close_logits(
        plain_logits(merged), torch_logits(peft_model(base, folder, multimodal=True)), plain_logits(base)
    )


@pytest.mark.parametrize("family", WITH_TEXT_CLASS)
def test_adapter_for_a_text_only_folder_uses_the_names_of_the_text_class(family: str, tmp_path: Path):
    base = random_folder(family, tmp_path / "base", 0)
    weights = open_weights(base)
    adapter = family_adapter(weights.config)
    write_peft(adapter, tmp_path / "adapter", base=identity_of(weights))
    model = peft_model(base, tmp_path / "adapter")
    assert_close_logits(torch_logits(model), adapted_logits(base, adapter), plain_logits(base))
    again = read_peft(save_quietly(model, tmp_path / "saved"), weights.config)
    assert_close_logits(adapted_logits(base, again), torch_logits(model), plain_logits(base))


@pytest.mark.parametrize("family", WITH_TEXT_CLASS, indirect=True)
def test_export_uses_the_names_of_the_given_base(base: Path, tmp_path: Path):
    weights = open_weights(base)
    adapter = family_adapter(weights.config)
    write_lora_gguf(adapter, tmp_path / "adapter.gguf", weights.config, base=identity_of(weights))
    assert OF_WHOLE in export(base, tmp_path / "adapter.gguf", tmp_path / "of_whole").notes
    assert has_multimodal_names(tmp_path / "of_whole")
    text = convert(convert(base, tmp_path / "twin.gguf").target, tmp_path / "text").target
    assert OF_WHOLE not in export(text, tmp_path / "of_whole", tmp_path / "of_text").notes
    theirs = torch_logits(peft_model(text, tmp_path / "of_text"))
    assert_close_logits(theirs, adapted_logits(base, adapter), plain_logits(base))


def test_the_doctor_finds_that_peft_agrees(base: Path, tmp_path: Path):
    weights = open_weights(base)
    write_peft(family_adapter(weights.config, lora_alpha=0.3), tmp_path / "adapter", base=identity_of(weights))
    last = examine(tmp_path / "adapter", base, against=("peft",))[-1]
    assert (last.name, last.state) == ("logits in PEFT", "ok"), last.text


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_doctor_checks_a_multimodal_adapter_on_a_text_only_file(base: Path, tmp_path: Path):
    twin = convert(base, tmp_path / "twin.gguf").target
    weights = open_weights(twin)
    write_peft(family_adapter(weights.config, lora_alpha=0.3), tmp_path / "adapter", base=identity_of(weights))
    last = examine(tmp_path / "adapter", twin, against=("peft",))[-1]
    assert (last.name, last.state) == ("logits in PEFT", "ok"), last.text
