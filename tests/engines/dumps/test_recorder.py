"""What an engine in Python shows of itself while it runs."""

from pathlib import Path

import numpy as np
import pytest
from builders.raw_dumps import golden_trace, weights_of
from helpers.refusals import Refusal, row

import llorch
from llorch.engines.dumps.index import open_raw
from llorch.engines.dumps.mapping import mapping_of
from llorch.engines.dumps.raw import RawArray
from llorch.engines.dumps.stage_mapping import stage_dump
from llorch.stages.stage_ref import Tokens
from llorch.stages.table import key


def recorded_arrays(dump: llorch.Recorder) -> dict[tuple[int, str], RawArray]:
    return {(n, key(array.name, array.layer)): array for n, array in dump.raw_dump().arrays}


def test_recorder_returns_the_array_and_records_a_copy():
    dump = llorch.Recorder(engine="mine", kv_cache="float16")
    dump.begin([4, 5])
    array = np.ones((2, 3), np.float32)
    assert dump("embed", array) is array
    array += 1
    np.testing.assert_array_equal(recorded_arrays(dump)[0, "embed"].read(), np.ones((2, 3), np.float32), strict=True)
    assert (dump.features.engine, dump.features.kv_cache) == ("mine", "float16")


def test_pass_continues_after_the_previous_one():
    dump = llorch.Recorder()
    for ids, position in (([4, 5], 30), ([6], None), (np.array([7]), 40)):
        dump.begin(ids, position)  # pyright: ignore[reportArgumentType]
        dump("logits", np.zeros((1, 2)))
    assert dump.raw_dump().passes == (Tokens((4, 5), 30), Tokens((6,), 32), Tokens((7,), 40))
    assert [*recorded_arrays(dump)] == [(0, "logits"), (1, "logits"), (2, "logits")]
    assert llorch.Recorder().passes == []


def test_a_function_is_recorded_in_the_layer_of_its_argument_or_of_its_call():
    dump = llorch.Recorder()

    @dump.stage("attn_norm")
    def norm(x: np.ndarray) -> np.ndarray:
        """Of mine."""
        return x + 1

    @dump.stage("q_rope", layer="i")
    def rope(x: np.ndarray, i: int) -> np.ndarray:
        return x + i

    @dump.stage("embed")
    def embed(x: np.ndarray) -> np.ndarray:
        return x

    for _ in range(2):
        dump.begin([1])
        x = embed(np.zeros(1))
        for i in (0, 1):
            x = rope(norm(x), i=i)
    names = ["embed", "l0.attn_norm", "l0.q_rope", "l1.attn_norm", "l1.q_rope"]
    assert [*recorded_arrays(dump)] == [(n, name) for n in (0, 1) for name in names]
    assert recorded_arrays(dump)[1, "l1.q_rope"].read() == [3]
    assert norm.__doc__ == "Of mine."


def test_bfloat16_is_stored_unchanged_and_read_as_equal_float32(tmp_path: Path):
    dump = llorch.Recorder()
    dump.begin([1])
    dump.add("embed", np.array([0x3FC0, 0xFF80, 0x0001], np.uint16), stored="bfloat16")
    expected = np.array([1.5, -np.inf, 2.0**-133], np.float32)
    dump.save(tmp_path / "d")
    assert (tmp_path / "d" / "data.bin").stat().st_size == 6
    for raw in (dump.raw_dump(), open_raw(tmp_path / "d")):
        assert raw.arrays[0][1].stored == "bfloat16"
        np.testing.assert_array_equal(raw.arrays[0][1].read(), expected, strict=True)


def record_stage_twice(dump: llorch.Recorder) -> None:
    dump.begin([1])
    dump("q_rope", np.zeros(1), layer=0)
    dump("q_rope", np.zeros(1), layer=1)
    dump("q_rope", np.zeros(1), layer=0)


REFUSALS = [
    row(
        "nothing begun", lambda: llorch.Recorder()("embed", np.zeros(1)), ValueError, "recorder:", "begin(ids)", "first"
    ),
    row(
        "a stage twice",
        lambda: record_stage_twice(llorch.Recorder()),
        ValueError,
        "recorder: l0.q_rope",
        "pass 0",
        "begin(ids)",
    ),
]


@pytest.mark.parametrize("refusal", REFUSALS)
def test_ambiguous_record_is_refused(refusal: Refusal):
    refusal.check()


def test_run_with_custom_names_is_equal_in_memory_and_on_disk(tmp_path: Path):
    weights = weights_of("micro-qwen2")
    ids, trace = golden_trace("micro-qwen2", "llamacpp")
    dump = llorch.Recorder(engine="mine", flash_attention=True)
    dump.weights = {"wq": "0" * 64}
    for rows, logits in ((slice(0, 5), 1.0), (slice(5, None), 2.0)):
        dump.begin(ids[rows])
        dump("rotated", trace["l1.q_rope"][rows].swapaxes(0, 1)[None], layer=1)
        dump("production_logits", logits * trace["logits"][rows])
        dump.add("logits", trace["logits"][rows][-1:], tokens=[len(trace["logits"][rows]) - 1], axes="seq vocab")
    dump.save(tmp_path / "d")
    raw, mapping = open_raw(tmp_path / "d"), mapping_of({"names": {"rotated": "q_rope"}})
    assert (raw.weights, raw.features) == (dump.weights, dump.features)
    for actual in (dump.stage_dump(weights, mapping=mapping), stage_dump(raw, weights.config, mapping=mapping)):
        assert actual.passes == (Tokens(ids[:5]), Tokens(ids[5:], 5))
        np.testing.assert_array_equal(actual.dumped[1, "l1.q_rope"].read(), trace["l1.q_rope"][5:], strict=True)
        assert actual.dumped[0, "logits"].tokens == (4,)
        assert [*actual.production] == [0, 1]
        np.testing.assert_array_equal(actual.production[1].read(), 2 * trace["logits"][5:], strict=True)
        assert not any("production" in note for note in actual.notes)
