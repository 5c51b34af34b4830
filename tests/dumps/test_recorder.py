"""What an engine in Python shows of itself while it runs."""

from collections.abc import Callable

import numpy as np
import pytest

import llorch
from llorch.dumps.stage_dump import Tokens


def test_an_array_goes_on_as_it_is_and_what_becomes_of_it_later_is_not_recorded():
    dump = llorch.Recorder(engine="mine", kv_cache="float16")
    dump.begin([4, 5])
    array = np.ones((2, 3), np.float32)
    assert dump("embed", array) is array
    array += 1
    whole = dump.stage_dump()
    np.testing.assert_array_equal(whole.seen[0, "embed"].read(), np.ones((2, 3), np.float32), strict=True)
    assert (whole.features.engine, whole.features.kv_cache) == ("mine", "float16")


def test_a_pass_goes_on_where_the_one_before_ended():
    dump = llorch.Recorder()
    for ids, position in (([4, 5], 30), ([6], None), (np.array([7]), 40)):
        dump.begin(ids, position)  # pyright: ignore[reportArgumentType]
        dump("logits", np.zeros((1, 2)))
    assert dump.stage_dump().passes == (Tokens((4, 5), 30), Tokens((6,), 32), Tokens((7,), 40))
    assert [*dump.stage_dump().seen] == [(0, "logits"), (1, "logits"), (2, "logits")]
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
    assert [*dump.stage_dump().seen] == [(n, name) for n in (0, 1) for name in names]
    assert dump.stage_dump().seen[1, "l1.q_rope"].read() == [3]
    assert norm.__doc__ == "Of mine."


def test_bfloat16_is_kept_as_it_is_and_read_as_float32_of_the_same_values():
    dump = llorch.Recorder()
    dump.begin([1])
    dump.add("embed", np.array([0x3FC0, 0xFF80, 0x0001], np.uint16), stored="bfloat16")
    want = np.array([1.5, -np.inf, 2.0**-133], np.float32)
    for array in (dump.stage_dump().seen[0, "embed"], dump.raw_dump().arrays[0][1]):
        assert array.stored == "bfloat16"
        np.testing.assert_array_equal(array.read(), want, strict=True)


def twice(dump: llorch.Recorder) -> None:
    dump.begin([1])
    dump("q_rope", np.zeros(1), layer=0)
    dump("q_rope", np.zeros(1), layer=1)
    dump("q_rope", np.zeros(1), layer=0)


def own_name(dump: llorch.Recorder) -> None:
    dump.begin([1])
    dump("my_q", np.zeros(1))
    assert [(n, array.name) for n, array in dump.raw_dump().arrays] == [(0, "my_q")]
    dump.stage_dump()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda dump: dump("embed", np.zeros(1)), r"^recorder: call begin\(ids\) before the first array$"),
        (twice, r"^recorder: l0.q_rope is there already in pass 0: call begin\(ids\) before each pass$"),
        (own_name, r"^recorder: expected names of the stage table, got my_q; give raw_dump\(\) and a mapping"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(wrong: Callable[[llorch.Recorder], None], message: str):
    with pytest.raises(ValueError, match=message):
        wrong(llorch.Recorder())
