import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from builders.tiny_models import random_tensors, write_folder
from helpers.refusals import refuses

from llorch.engines import EngineName
from llorch.files import open_weights
from llorch.files.mapped import MappedFile
from llorch.files.tokenizer import Tokenizer
from llorch.judging import verify
from llorch.judging.expectations.files import differing, library_tensors, llorch_tensors
from llorch.judging.goldens.forward import TokenCheck
from llorch.judging.types import Comparison
from llorch.judging.verify import compare_tensors, compare_tokens, plan_live, verify_live, verify_stored
from llorch.model.model import Model
from llorch.runtime.builtin import builtin_path
from llorch.stages.comparison import FAIL, PASS

PATH = builtin_path("micro-qwen2")


def test_both_readers_see_the_same_tensors():
    assert differing(llorch_tensors(open_weights(PATH).source), library_tensors(PATH)) == []


def test_one_flipped_bit_of_a_weight_fails_the_foundation(tmp_path: Path):
    copy = tmp_path / "flipped.gguf"
    content = bytearray(PATH.read_bytes())
    content[-100] ^= 1
    copy.write_bytes(content)
    (comparison,) = compare_tensors("flipped", llorch_tensors(open_weights(copy).source), library_tensors(PATH))
    assert comparison.verdict == FAIL
    assert comparison.note.endswith(" (other bytes)")


def test_a_tensor_that_one_reader_alone_sees_fails_the_foundation():
    table = llorch_tensors(open_weights(PATH).source)
    less = {name: entry for name, entry in table.items() if name != "blk.1.ffn_up.weight"}
    for own, foreign in ((less, table), (table, less), ({}, table), (table, {})):
        (comparison,) = compare_tensors("micro-qwen2", own, foreign)
        assert comparison.verdict == FAIL
        assert ("nothing, not F32 " in comparison.note) == (foreign is table)
    assert differing(less, table) == differing(table, less) == ["blk.1.ffn_up.weight"]


def test_every_text_is_compared_and_the_share_of_wrong_ones_is_given():
    encode = Model(open_weights(PATH)).tokenizer.encode
    checks = [TokenCheck("Once", {"llamacpp": encode("Once")}) for _ in range(3)]
    assert [c.verdict for c in compare_tokens("micro-qwen2", encode, checks)] == [PASS]
    (comparison,) = compare_tokens("micro-qwen2", encode, [*checks, TokenCheck("upon", {"llamacpp": [1]})])
    assert (comparison.verdict, comparison.difference.error) == (FAIL, 0.25)
    assert comparison.note.startswith("'upon': ")


def live(ids: Sequence[int], engines: Sequence[EngineName] = ("llamacpp",), **options: str) -> Iterator[Comparison]:
    return verify_live(plan_live(open_weights(PATH), ids, engines, **options))


@pytest.mark.live
def test_a_live_run_starts_with_the_tensors_of_the_other_reader(monkeypatch: pytest.MonkeyPatch):
    first = next(live(range(8)))
    assert (first.stage_ref.name, first.verdict) == ("tensors", PASS)
    monkeypatch.setattr(verify, "library_tensors", lambda path: {**library_tensors(path), "more": "F32 1"})
    first = next(live(range(8)))
    assert (first.verdict, first.note) == (FAIL, "more (nothing, not F32 1)")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_other_reader_is_not_ours(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = PATH if kind == "file" else write_folder(tmp_path / "tiny", random_tensors("llama"))
    own = llorch_tensors(open_weights(path).source)
    monkeypatch.delattr(MappedFile, "__init__")  # what both of our readers read with
    with pytest.raises(TypeError):
        open_weights(path)
    assert library_tensors(path) == own


@pytest.mark.live
def test_the_text_of_a_live_run_is_tokenized_by_the_engine_too(monkeypatch: pytest.MonkeyPatch):
    text = "Once upon a time"
    ids = Model(open_weights(PATH)).tokenizer.encode(text)
    assert next(c.verdict for c in live(ids, text=text) if c.stage_ref.name == "token_ids") == PASS
    monkeypatch.setattr(Tokenizer, "encode", lambda tokenizer, text: ids[::-1])
    assert next(c.verdict for c in live(ids, text=text) if c.stage_ref.name == "token_ids") == FAIL


def test_goldens_of_other_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copy(builtin_path("micro-qwen3"), tmp_path / "micro-qwen2.gguf")
    monkeypatch.setattr("llorch.judging.goldens.forward.builtin_path", lambda name: tmp_path / f"{name}.gguf")
    where = ("golden micro-qwen2", tmp_path / "micro-qwen2.gguf")
    with refuses(ValueError, "weights", "reference_outputs/regenerate.py", where=where):
        list(verify_stored("micro-qwen2"))


def test_a_missing_golden_folder_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verify, "goldens_folder", lambda: tmp_path)
    with refuses(FileNotFoundError, where=tmp_path / "micro-qwen2" / "golden.json"):
        list(verify_stored("micro-qwen2"))


@pytest.mark.live
@pytest.mark.parametrize("name", ["micro-llama3", "micro-qwen2"])
def test_a_file_verifies_live_against_both_engines(name: str):
    said: list[str] = []
    plan = plan_live(open_weights(builtin_path(name)), range(20, 32), ["llamacpp", "transformers"])
    comparisons = list(verify_live(plan, progress=said.append))
    assert {c.verdict for c in comparisons} == {PASS}
    assert {c.engine for c in comparisons} == {"reader", "llamacpp", "transformers", "transformers-float64"}
    assert {c.stage_ref.checkpoint for c in comparisons} >= {"00", "01b", "03", "08", "12"}
    assert "running llamacpp" in said


@pytest.mark.live
def test_live_and_stored_errors_are_alike():
    both = verify_stored("micro-qwen2", long=False), live(range(40, 52), ["llamacpp", "transformers"])
    stored, now = ([c.engine_error for c in rows if (c.mode, c.stage_ref.run) == ("chained", "near")] for rows in both)
    assert len(stored) == len(now)
    assert 0.2 < np.median([*filter(None, now)]) / np.median([*filter(None, stored)]) < 5


def test_a_prompt_whose_traces_do_not_fit_the_memory_is_refused_before_an_engine_runs(monkeypatch: pytest.MonkeyPatch):
    config = open_weights(PATH).config
    monkeypatch.setattr(verify, "available_memory", lambda: 2.5e9)
    verify.require_memory(config, 12, n_traces=5)
    with refuses(MemoryError, "1000000 tokens", "2.5 GB", "prompt") as caught:
        verify.require_memory(config, 10**6, n_traces=5)
    needed, free = map(float, re.findall(r"(\d+\.\d) GB", str(caught.value)))
    assert needed > free


def test_prompt_near_the_context_end_gets_fewer_greedy_tokens(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []

    def run_cases(engine: None, cases: object, *, n_greedy: int = 99) -> None:
        asked.append(n_greedy)
        raise RuntimeError

    monkeypatch.setattr(verify, "run_cases", run_cases)
    monkeypatch.setattr(verify, "require_memory", lambda *_, **__: None)
    monkeypatch.setattr(verify, "open_engine", lambda name, path, progress: nullcontext())
    length = open_weights(PATH).config.max_position_embeddings
    for missing in (30, 3, 0):
        plan = plan_live(open_weights(PATH), [1] * (length - missing), ["llamacpp"])
        verify.run_engines(plan, progress=print, failed={})
    assert asked == [24, 4, 1]


def test_a_model_that_does_not_fit_every_engine_is_refused_with_the_figures(monkeypatch: pytest.MonkeyPatch):
    weights = open_weights(PATH)
    ours = 4 * sum(int(np.prod(weights.shape(name))) for name in weights)
    monkeypatch.setattr("llorch.judging.verify.available_memory", lambda: 1.1 * ours)
    verify.require_engines(weights, ["llamacpp"], llorch_bytes=ours)
    with refuses(MemoryError, "GB", "--numerics ggml", "--against llamacpp", where=PATH):
        verify.require_engines(weights, ["llamacpp", "transformers"], llorch_bytes=ours)


def test_reference_that_exceeds_memory_is_refused(monkeypatch: pytest.MonkeyPatch):
    weights = open_weights(PATH)
    layer = 8 * sum(int(np.prod(weights.shape(name))) for name in weights if name.startswith("layers.0."))
    needed = 1.2 * layer  # the largest part of it
    monkeypatch.setattr("llorch.judging.verify.available_memory", lambda: needed)
    verify.require_reference(weights)
    monkeypatch.setattr("llorch.judging.verify.available_memory", lambda: needed - 1)
    with refuses(MemoryError, "reference", "float64", f"{needed / 1e9:.1f} GB"):
        verify.require_reference(weights)
