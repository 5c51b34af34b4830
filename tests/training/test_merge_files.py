"""Merging on disk: what is written, what is copied, what is refused, and that nothing is left of a failure."""

import errno
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy as container
from builders.quantised_folders import FOLDERS
from builders.random_adapters import EVERY, adapted_logits, plain_logits, random_adapter, tiny_base
from builders.whole_folders import write_whole_folder
from helpers.refusals import assert_tells, refuses

from llorch.apps.doctor.adapter import examine
from llorch.files import open_gguf, open_weights
from llorch.files.convert import convert
from llorch.files.export import write_gguf
from llorch.files.quant import GGMLType
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import LORA_A, Adapter, LoraTensors
from llorch.lora.base import identity_of
from llorch.lora.export import export
from llorch.lora.files import adapter_for
from llorch.lora.merge import MergedWeights
from llorch.lora.peft_format import write_peft
from llorch.runtime.builtin import builtin_path
from llorch.training.merge_files import N_IDS, compare_logits, logits_by, merge, probe_ids


def pair(folder: Path, base: Path, **settings: Any) -> tuple[Path, Adapter]:
    weights = open_weights(base)
    adapter = random_adapter(weights.config, **settings)
    write_peft(adapter, folder / "adapter", base=identity_of(weights))
    return folder / "adapter", adapter


def digests(path: Path) -> dict[str, str]:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()}


@pytest.mark.parametrize("source", ["folder", "m.gguf"])
@pytest.mark.parametrize("target", ["merged", "merged.gguf"])
@pytest.mark.parametrize(
    ("family", "tied", "modules"), [("llama", False, EVERY), ("qwen3", True, ("lm_head", "q_proj"))]
)
def test_every_way_gives_the_logits_of_the_adapter_beside_the_base(tmp_path, source, target, family, tied, modules):
    base = tiny_base(tmp_path / "folder", family, tied=tied)
    if source == "m.gguf":
        write_gguf(open_weights(base), tmp_path / source)
    adapter_path, adapter = pair(tmp_path, base, target_modules=modules)
    before = digests(tmp_path / source), digests(adapter_path)
    done = merge(tmp_path / source, adapter_path, tmp_path / target)
    expected = adapted_logits(base, adapter)
    np.testing.assert_allclose(plain_logits(tmp_path / target), expected, rtol=0, atol=3e-6 * np.abs(expected).max())
    assert (digests(tmp_path / source), digests(adapter_path)) == before
    assert_tells(done.notes[0], "base", "same")
    assert done.logits is not None
    assert done.logits.error < 3e-5 < 0.01 < done.logits.effect


def base_with_every_file(folder: Path) -> Path:
    write_whole_folder(folder, "qwen2")
    (folder / "additional_chat_templates").mkdir()
    others = ("special_tokens_map.json", "chat_template.jinja", "vocab.json", "merges.txt", "added_tokens.json")
    for name in (*others, "tokenizer.model", "additional_chat_templates/rag.jinja"):
        (folder / name).write_text("{ }\n")
    return folder


def test_a_folder_keeps_every_other_file_byte_for_byte_and_may_be_replaced_with_all_of_them(tmp_path):
    base = base_with_every_file(tmp_path / "base")
    adapter, _ = pair(tmp_path, base)
    merge(base, adapter, tmp_path / "merged")
    before, after = digests(base), digests(tmp_path / "merged")
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == ["model.safetensors"]
    with pytest.raises(FileExistsError):
        merge(base, adapter, tmp_path / "merged")
    merge(base, adapter, tmp_path / "merged", force=True)
    assert digests(tmp_path / "merged") == after


@pytest.mark.parametrize("target", ["new/er/merged", "new/er/merged.gguf"])
def test_missing_folders_above_the_target_are_made_and_go_with_a_failure(tmp_path, target, monkeypatch):
    base = tiny_base(tmp_path / "base")
    adapter, _ = pair(tmp_path, base)
    with monkeypatch.context() as context:
        context.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        with refuses(OSError, where=tmp_path / target):
            merge(base, adapter, tmp_path / target)
    assert not (tmp_path / "new").exists()
    assert merge(base, adapter, tmp_path / target).target.exists()


@pytest.mark.parametrize("name", ["special_tokens_map.json", "additional_chat_templates/rag.jinja"])
def test_a_link_into_the_download_cache_is_followed_and_one_to_elsewhere_refused(tmp_path, name):
    whole = base_with_every_file(tmp_path / "whole")
    base, blobs = tmp_path / "models--a--b/snapshots/1f", tmp_path / "models--a--b/blobs"
    blobs.mkdir(parents=True)
    for file in whole.rglob("*.*"):  # as huggingface_hub lays it out: every file is a link
        link = base / file.relative_to(whole)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(file.rename(blobs / file.name), link.parent))
    adapter, _ = pair(tmp_path, base)
    merge(base, adapter, tmp_path / "merged")
    assert digests(tmp_path / "merged").keys() == digests(base).keys()
    assert not any(file.is_symlink() for file in (tmp_path / "merged").rglob("*"))
    (tmp_path / "secret").write_text("{ }")
    (base / name).unlink()
    (base / name).symlink_to(tmp_path / "secret")
    for target in ("new", "new.gguf") if name.endswith(".jinja") else ("new",):
        with refuses("Unsafe", name, "link", where=base):
            merge(base, adapter, tmp_path / target)
        assert not (tmp_path / target).exists()


@pytest.mark.parametrize("kind", ["BF16", "F16", "F32"])
def test_a_folder_of_another_dtype_says_so_in_its_configuration(tmp_path, kind, base):
    config = base / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"torch_dtype": "float32"}))
    merge(base, pair(tmp_path, base)[0], tmp_path / "merged", ggml_type=GGMLType[kind])
    written = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert written["torch_dtype"] == {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[kind]
    assert ((tmp_path / "merged" / "config.json").read_bytes() == config.read_bytes()) == (kind == "F32")


def test_a_tied_base_parts_where_the_output_is_adapted(tmp_path):
    base = tiny_base(tmp_path / "base", tied=True)
    done = merge(base, pair(tmp_path, base, target_modules=("lm_head",))[0], tmp_path / "merged")
    assert not open_weights(tmp_path / "merged").config.tie_word_embeddings
    (note,) = (note for note in done.notes if "tie_word_embeddings" in note)
    assert_tells(note, "config.json", "false")
    merge(base, tmp_path / "adapter", tmp_path / "merged.gguf")
    assert "output.weight" in open_gguf(tmp_path / "merged.gguf").tensors


def test_the_sum_is_rounded_once(tmp_path, base):
    path, adapter = pair(tmp_path, base)
    done = merge(base, path, tmp_path / "merged", ggml_type=GGMLType.BF16)
    exact = MergedWeights(open_weights(base), adapter)
    for name in adapter.targets:
        expected = exact.read(name)
        actual = open_weights(tmp_path / "merged").read(name)
        step = 2.0 ** (np.floor(np.log2(np.abs(expected))) - 7)  # of bfloat16
        assert (np.abs(actual - expected) <= step / 2).all()
        assert done.changes[name].rounding == pytest.approx(np.abs(actual - expected).max())


def test_what_rounding_swallowed_is_counted(tmp_path, base, weights):
    write_peft(random_adapter(weights.config, lora_alpha=1e-4), tmp_path / "adapter", base=identity_of(weights))
    fine = merge(base, tmp_path / "adapter", tmp_path / "fine")
    coarse = merge(base, tmp_path / "adapter", tmp_path / "coarse", ggml_type=GGMLType.BF16)
    assert max(change.vanished for change in fine.changes.values()) < 0.05
    assert min(change.vanished for change in coarse.changes.values()) > 0.8


def test_a_quantised_base_is_named_and_merged_from_its_decoded_numbers(tmp_path):
    source = tiny_base(tmp_path / "source")
    write_gguf(open_weights(source), tmp_path / "base.gguf", ggml_type=GGMLType.Q8_0)
    weights = open_weights(tmp_path / "base.gguf")
    adapter = random_adapter(weights.config, target_modules=("q_proj",))
    write_peft(adapter, tmp_path / "adapter", base=identity_of(open_weights(source)))
    done = merge(tmp_path / "base.gguf", tmp_path / "adapter", tmp_path / "merged.gguf")
    assert done.ggml_type is GGMLType.F32
    assert any("decoded" in note and "quantised" in note for note in done.notes)
    assert any(note.startswith("base:") and "unknown" in note for note in done.notes)
    expected = MergedWeights(weights, adapter)
    actual = open_weights(tmp_path / "merged.gguf")
    for name in expected:
        np.testing.assert_array_equal(actual.read(name), expected.read(name))


def test_merge_of_a_base_with_quantised_experts_alone_notes_their_type(tmp_path, monkeypatch):
    types = {"experts_gate_proj": GGMLType.Q8_0, "experts_up_proj": GGMLType.Q8_0}
    choose = "llorch.files.export._written_type"
    monkeypatch.setattr(choose, lambda weight, _: types.get(weight.name.rpartition(".")[2], GGMLType.F32))
    write_gguf(open_weights(builtin_path("micro-qwen3-moe")), tmp_path / "base.gguf", ggml_type=GGMLType.Q8_0)
    monkeypatch.undo()
    path, _ = pair(tmp_path, tmp_path / "base.gguf", target_modules=("q_proj",))
    done = merge(tmp_path / "base.gguf", path, tmp_path / "merged")
    assert done.base_types == ["F32", "Q8_0"]
    assert any("decoded" in note and "(Q8_0)" in note for note in done.notes)


def test_what_is_not_adapted_keeps_its_quantised_bytes(tmp_path):
    write_gguf(open_weights(tiny_base(tmp_path / "s")), tmp_path / "base.gguf", ggml_type=GGMLType.Q8_0)
    path, _ = pair(tmp_path, tmp_path / "base.gguf", target_modules=("q_proj",))
    merge(tmp_path / "base.gguf", path, tmp_path / "merged.gguf", ggml_type=GGMLType.Q8_0)
    before, after = open_weights(tmp_path / "base.gguf"), open_weights(tmp_path / "merged.gguf")
    for name in before:
        assert np.array_equal(before.as_stored(name).raw, after.as_stored(name).raw) != name.endswith("q_proj")


def test_another_base_is_refused_unless_it_is_wanted(tmp_path, base):
    path, _ = pair(tmp_path, base)
    other = tiny_base(tmp_path / "other", tied=True)
    with refuses("BaseMismatch", "constants", base, other, where=path):
        merge(other, path, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    assert_tells(merge(other, path, tmp_path / "merged", any_base=True).notes[0], "base", "another", "accepted")


def original_of(folder: Path, trained: Path) -> Path:
    """Write floats near the numbers of a quantised folder, with the same norms: what it might be quantised from."""
    convert(trained, folder)
    path = folder / "model.safetensors"
    tensors = {
        name: array if array.ndim == 1 else array + array.std() * np.float32(0.05) * np.sign(array)
        for name, array in container.load_file(path).items()
    }
    container.save_file(tensors, path, {"format": "pt"})
    return folder


@pytest.fixture(params=["Q4_0", "NF4", "NF4 by PEFT"])
def of_quantised(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Path, Path]:
    """An adapter that was trained on a quantised base: the type, that base, the original, and the adapter."""
    if request.param == "Q4_0":
        original, trained = tiny_base(tmp_path / "original"), tmp_path / "original.gguf"
        write_gguf(open_weights(original), trained, ggml_type=GGMLType.Q4_0)
    else:
        trained = Path(shutil.copytree(FOLDERS / "bnb-nf4-double", tmp_path / "four-bit" / "original"))
        original = original_of(tmp_path / "original", trained)
    adapter, _ = pair(tmp_path, trained, target_modules=("q_proj", "v_proj"))
    if request.param == "NF4 by PEFT":
        (adapter / "llorch_base.json").unlink()  # only adapter_config.json names the base then
    return request.param.split()[0], trained, original, adapter


def test_merging_an_adapter_of_a_quantised_base_into_the_original_is_refused(tmp_path, of_quantised):
    kind, trained, original, adapter = of_quantised
    with refuses("BaseMismatch", "quantisation error", trained, kind, original, "--any-base", where=adapter) as caught:
        merge(original, adapter, tmp_path / "merged")
    share = re.search(r"(\d+\.\d+)%", str(caught.value))
    assert share is not None
    assert 1 < float(share[1]) < 20
    assert not (tmp_path / "merged").exists()
    notes = merge(original, adapter, tmp_path / "merged", any_base=True).notes
    assert any("quantisation error" in note and f"{share[0]} " in note for note in notes)
    notes = merge(trained, adapter, tmp_path / "on-trained").notes
    assert not any("quantisation error" in note for note in notes)


def test_merging_an_adapter_of_a_quantised_base_that_is_gone_is_refused_without_a_size(tmp_path, base):
    write_gguf(open_weights(base), tmp_path / "x.gguf", ggml_type=GGMLType.Q4_0)
    adapter, _ = pair(tmp_path, tmp_path / "x.gguf")
    (tmp_path / "x.gguf").unlink()
    with refuses("BaseMismatch", "quantisation error", "Q4_0", where=adapter) as caught:
        merge(base, adapter, tmp_path / "merged")
    assert "%" not in str(caught.value)


def test_each_use_of_an_adapter_of_a_quantised_base_tells_the_quantisation_error(tmp_path, of_quantised):
    _, _, original, adapter = of_quantised
    _, verdict = adapter_for(open_weights(original), adapter, any_base=False)
    assert "quantisation error" in verdict
    assert "quantisation error" in export(original, adapter, tmp_path / "x.gguf").notes[0]
    finding = next(one for one in examine(adapter, original, against=()) if one.name == "base")
    assert (finding.state, "quantisation error" in finding.text) == ("warning", True)


@pytest.mark.parametrize("target", ["base", "adapter", "."])
def test_the_target_is_neither_the_base_nor_the_adapter_nor_holds_them(tmp_path, target, base):
    path, _ = pair(tmp_path, base)
    before = digests(tmp_path)
    source = tmp_path / ("base" if target == "base" else "adapter")
    with refuses(ValueError, f"source {source}", where=tmp_path / target):
        merge(base, path, tmp_path / target, force=True)
    assert digests(tmp_path) == before


@pytest.mark.parametrize("target", ["merged", "merged.gguf"])
def test_failed_merge_writes_no_file(tmp_path, monkeypatch, target, base):
    path, _ = pair(tmp_path, base)
    before = sorted(file.name for file in tmp_path.iterdir())
    read, calls = MergedWeights.read, []

    def failing(self: MergedWeights, name: str) -> np.ndarray:
        calls.append(name)
        assert not (tmp_path / target).exists()  # so whoever is killed here leaves none
        if len(calls) > 9:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return read(self, name)

    monkeypatch.setattr(MergedWeights, "read", failing)
    with refuses(OSError, where=tmp_path / target) as caught:
        merge(base, path, tmp_path / target)
    assert caught.value.errno == errno.ENOSPC
    assert sorted(file.name for file in tmp_path.iterdir()) == before


def knowing(adapter: Adapter, ids: list[int]) -> Adapter:
    """An adapter of the embedding that was trained on a few tokens only."""
    made = adapter.tensors["embed_tokens"].arrays()
    rows = np.zeros_like(made[LORA_A])
    rows[:, ids] = made[LORA_A][:, ids]
    return Adapter(adapter.config, adapter.targets, {"embed_tokens": LoraTensors(**made | {LORA_A: rows})})


def test_the_ids_are_different_ones_from_all_over_the_vocabulary(weights):
    ids = probe_ids(50_000, random_adapter(weights.config))
    assert len(set(ids.tolist())) == N_IDS
    assert set((ids // 10_000).tolist()) == {0, 1, 2, 3, 4}


def test_merged_embedding_is_compared_on_its_trained_tokens(weights):
    plain = probe_ids(weights.config.vocab_size, random_adapter(weights.config)).tolist()
    unseen = next(token for token in range(weights.config.vocab_size) if token not in plain)
    adapter = knowing(random_adapter(weights.config, target_modules=("embed_tokens",)), [unseen])
    ids = probe_ids(weights.config.vocab_size, adapter)
    assert unseen in ids
    found = compare_logits(weights, adapter, MergedWeights(weights, adapter))
    assert found.effect == np.abs(logits_by(AdaptedWeights(weights, adapter), ids) - logits_by(weights, ids)).max() > 0
    assert found.error < 1e-4 * found.effect
