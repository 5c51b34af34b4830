"""What a conversion looks at before and after it writes, and which settings it takes along."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import random_tensors, write_folder
from whole_folders import write_whole_folder

from llorch import convert as conversion
from llorch.builtin import builtin_path
from llorch.convert import convert
from llorch.errors import FormatError
from llorch.files import open_gguf, open_weights
from llorch.files.quant import GGMLType


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_norm_beyond_float16_makes_a_folder_of_float32(tmp_path: Path):
    tensors = random_tensors("llama")
    tensors["model.norm.weight"][3] = 70000
    convert(write_folder(tmp_path / "a", tensors), tmp_path / "m.gguf", ggml_type=GGMLType.F16)
    assert convert(tmp_path / "m.gguf", tmp_path / "b").ggml_type is GGMLType.F32
    assert open_weights(tmp_path / "b")["final_norm"][3] == 70000


def test_a_llama_model_keeps_the_bias_of_its_attention(tmp_path: Path):
    tensors = random_tensors("llama")
    for layer in (0, 1):
        for part, width in (("q", 32), ("k", 16), ("v", 16), ("o", 32)):
            tensors[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = np.arange(width, dtype=np.float32)
    source = write_folder(tmp_path / "a", tensors, attention_bias=True)
    convert(source, tmp_path / "m.gguf")
    back = open_weights(tmp_path / "m.gguf")
    assert back["layers.1.o_bias"].tolist() == list(range(32))
    assert back["layers.1.q_bias"].tolist() == list(range(32))


def test_settings_of_sampling_that_are_not_used_are_not_taken_along(tmp_path: Path):
    source = write_whole_folder(tmp_path / "a", "llama-bpe")
    settings = source / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"do_sample": False}))
    convert(source, tmp_path / "m.gguf")
    with open_gguf(tmp_path / "m.gguf") as file:
        assert not [key for key in file.metadata if key.startswith("general.sampling.")]
    convert(tmp_path / "m.gguf", tmp_path / "b")
    assert "do_sample" not in json.loads((tmp_path / "b" / "generation_config.json").read_text())
    assert json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())["model_max_length"] == 512
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (260, [261, 259])


def test_every_setting_of_sampling_goes_there_and_back(tmp_path: Path):
    from gguf import Keys

    settings = {"temperature": 0.75, "top_k": 20, "top_p": 0.875, "min_p": 0.0625, "repetition_penalty": 1.125}
    names = ("SAMPLING_TEMP", "SAMPLING_TOP_K", "SAMPLING_TOP_P", "SAMPLING_MIN_P", "SAMPLING_PENALTY_REPEAT")
    source = write_whole_folder(tmp_path / "a", "llama-bpe")
    (source / "generation_config.json").write_text(json.dumps({"do_sample": True, **settings}))
    convert(source, tmp_path / "m.gguf")
    with open_gguf(tmp_path / "m.gguf") as file:
        assert [file.metadata[getattr(Keys.General, name)] for name in names] == list(settings.values())
    convert(tmp_path / "m.gguf", tmp_path / "b")
    back = json.loads((tmp_path / "b" / "generation_config.json").read_text())
    assert {key: back.get(key) for key in settings} == settings


def test_a_file_of_another_configuration_is_refused_after_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = conversion.read_back

    def changed(path: Path, *others: Any) -> None:
        content = path.read_bytes()
        before, after = (np.float32(theta).tobytes() for theta in (10000.0, 20000.0))
        at = content.index(before, content.index(b"rope.freq_base"))
        path.write_bytes(content[:at] + after + content[at + 4 :])
        right(path, *others)

    source = write_folder(tmp_path / "a", random_tensors("llama"))
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "read_back", changed)
        with pytest.raises(FormatError, match=r"rope_theta: the target would have 20000\.0, the source has 10000\.0"):
            convert(source, tmp_path / "m.gguf")
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("target", ["m.gguf", "folder"])
def test_what_was_written_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str):
    source = write_folder(tmp_path / "a", random_tensors("llama"))
    if target == "folder":
        source = convert(source, tmp_path / "b.gguf").target
    before = names(tmp_path)
    monkeypatch.setattr("llorch.write_checks.open_weights", lambda path: opened_once(path, source))
    with pytest.raises(FormatError, match="cannot be read"):
        convert(source, tmp_path / target)
    assert names(tmp_path) == before


def opened_once(path: Path, source: Path) -> object:
    if path != source:
        raise FormatError("Truncated", "cannot be read", path=path)
    return open_weights(path)


def test_a_tokenizer_that_gives_other_ids_is_refused_after_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = conversion.translate_vocabulary

    def wrong(*parts: object, **named: object) -> object:
        made = right(*parts, **named)  # type: ignore[arg-type]
        made.tokenizer["model"]["merges"].clear()
        return made

    monkeypatch.setattr(conversion, "translate_vocabulary", wrong)
    with pytest.raises(FormatError, match="the target would encode"):
        convert(builtin_path("story"), tmp_path / "folder")
    assert names(tmp_path) == []


def test_a_folder_inside_of_the_target_is_no_file_of_a_model(tmp_path: Path):
    convert(builtin_path("micro-llama"), tmp_path / "folder")
    (tmp_path / "folder" / "more.safetensors").mkdir()
    with pytest.raises(FileExistsError, match=r"holds more\.safetensors, which is no file of a model"):
        convert(builtin_path("micro-qwen3"), tmp_path / "folder", force=True)
