"""Orders of GGUF files: a right engine that keeps one passes with a note, an engine that permutes a part does not."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from faults.wrong_dumps import WHOLE, dump_run, everywhere, float64_weights, mistake, passes
from helpers.refusals import assert_tells

from llorch.diagnosis.diagnose import check_stages, findings
from llorch.diagnosis.replay import UNCHANGED, Change, StageChange
from llorch.engines.dumps.layout import PAIRED, VALUE_HEADS
from llorch.engines.dumps.stage_dump import StageDump
from llorch.families.config import ModelConfig
from llorch.files.tensor_names import interleave
from llorch.stages.comparison import FAIL
from llorch.stages.table import BY_NAME

LLAMA, QWEN, HYBRID = "micro-llama", "micro-qwen3", "micro-qwen3.5"
Permute = Callable[[np.ndarray, str, ModelConfig], np.ndarray]


def pair(array: np.ndarray, stage: str, config: ModelConfig) -> np.ndarray:
    return interleave(array.reshape(-1), array.size // config.head_dim).reshape(array.shape)


def tile(array: np.ndarray, stage: str, config: ModelConfig) -> np.ndarray:
    """Head h of every key head in turn, instead of all heads of one key head."""
    net, axis = config.delta_net, VALUE_HEADS[stage] % array.ndim
    assert net is not None
    n_leading = 2 * net.key_width if "conv_width" in BY_NAME[stage].axes else 0
    leading, heads = np.split(array, [n_leading], axis=axis)
    grouped = heads.reshape(*heads.shape[:axis], net.n_key_heads, 3, -1, *heads.shape[axis + 1 :])
    return np.concatenate([leading, grouped.swapaxes(axis, axis + 1).reshape(heads.shape)], axis)


def permuted(dump: StageDump, model: str, permute: Permute, stages: Sequence[str]) -> StageDump:
    """The dump of an engine that keeps a file's order in some stages."""
    config = float64_weights(model).config
    dumped = {
        (n, key): replace(x, read=lambda x=x, stage=stage: permute(x.read(), stage, config)) if stage in stages else x
        for (n, key), x in dump.dumped.items()
        for stage in [key.rpartition(".")[2]]
    }
    return replace(dump, dumped=dumped)


def wrong_stages(model: str, dump: StageDump) -> tuple[set[str], str]:
    """Keys that fail, and the notes."""
    checker, checks = check_stages(float64_weights(model), dump, lambda line: None)
    return {check.key for check in checks if check.verdict == FAIL}, " ".join(checker.replay.dump.notes)


def among(*stages: str) -> Callable[[str], bool]:
    return lambda key: key.rpartition(".")[2] in stages


ORDERS = {LLAMA: (pair, PAIRED), QWEN: (pair, PAIRED), HYBRID: (tile, tuple(VALUE_HEADS))}


@pytest.mark.parametrize(
    ("model", "is_dumped"),
    [
        (LLAMA, WHOLE), (QWEN, WHOLE), (HYBRID, WHOLE), (LLAMA, among("q_rope", "k_rope")),
        (LLAMA, among("q_proj", "k_proj", "attn_probs")), (LLAMA, among("q_rope", "attn_scores")),
        (LLAMA, among("q_proj", "k_proj", "block_out")), (HYBRID, among("z_in", "delta_out", "block_out")),
    ],
)  # fmt: skip
def test_order_of_a_file_that_cancels_passes_with_a_note(model: str, is_dumped: Callable[[str], bool]):
    dump = dump_run(model, passes(model, 5, 7), is_dumped=is_dumped)
    assert wrong_stages(model, dump) == (set(), "")
    wrong, notes = wrong_stages(model, permuted(dump, model, *ORDERS[model]))
    assert wrong == set()
    assert_tells(notes, 'value_heads = "tiled"' if model == HYBRID else 'permuted = "interleaved"')


def test_another_mistake_behind_a_kept_order_is_named():
    injected = everywhere(mistake("swiglu-gelu", LLAMA), float64_weights(LLAMA))
    dump = permuted(dump_run(LLAMA, passes(LLAMA), injected), LLAMA, pair, PAIRED)
    first, *_ = findings(float64_weights(LLAMA), dump)
    assert (first.key, first.causes[0].name) == ("l0.ffn_act", "swiglu-gelu")


@pytest.mark.parametrize("is_dumped", [
    WHOLE, among("q_proj", "k_proj", "attn_scores"), among("q_proj", "k_proj", "logits"), among("q_proj", "k_proj"),
    among("q_proj", "k_proj", "q_rope"),
], ids=["whole", "scores", "logits", "nothing later", "queries only"])  # fmt: skip
def test_rows_in_the_order_of_a_file_with_the_other_rotation_fail(is_dumped: Callable[[str], bool]):
    injected = everywhere(mistake("qk-rows-left-interleaved", LLAMA), float64_weights(LLAMA))
    first, *_ = findings(float64_weights(LLAMA), dump_run(LLAMA, passes(LLAMA), injected, is_dumped))
    assert (first.key, first.causes[0].name) == ("l0.q_proj", "qk-rows-left-interleaved")


@pytest.mark.parametrize("stages", [("q_proj", "q_rope"), ("k_proj", "k_rope", "k_cache"), ("q_rope",), ("q_proj",)])
def test_order_of_a_part_of_queries_and_keys_fails(stages: tuple[str, ...]):
    dump = permuted(dump_run(LLAMA, passes(LLAMA)), LLAMA, pair, stages)
    wrong, notes = wrong_stages(LLAMA, dump)
    assert f"l0.{stages[0]}" in wrong
    assert not notes


def test_queries_permuted_after_rotation_fail():
    turned = StageChange(lambda inputs, stage, array: pair(array, stage, inputs.config))
    change = Change(dict.fromkeys(("l0.q_rope", "l1.q_rope", "l2.q_rope"), turned))
    wrong, notes = wrong_stages(LLAMA, dump_run(LLAMA, passes(LLAMA), change))
    assert (wrong, notes) == ({"l0.q_rope", "l1.q_rope", "l2.q_rope"}, "")


def test_tiled_heads_that_do_not_cancel_fail():
    injected = everywhere(mistake("delta-value-heads-tiled-in-file", HYBRID), float64_weights(HYBRID))
    wrong, notes = wrong_stages(HYBRID, dump_run(HYBRID, passes(HYBRID), injected))
    assert {key.rpartition(".")[2] for key in wrong} == {"qkv_in", "z_in", "b_in", "a_in"}
    assert not notes
    some = tuple(stage for stage in VALUE_HEADS if stage not in ("b_in", "beta"))
    wrong, notes = wrong_stages(HYBRID, permuted(dump_run(HYBRID, passes(HYBRID)), HYBRID, tile, some))
    assert (bool(wrong), notes) == (True, "")


def test_order_is_not_assumed_if_keys_are_wrong_in_it_too():
    """The dump has one row of the keys, so that it does not replace llorch's keys in later stages."""
    dump = permuted(
        dump_run(LLAMA, passes(LLAMA), is_dumped=among("q_rope", "k_proj", "attn_scores")), LLAMA, pair, PAIRED
    )
    rows = {
        (n, key): replace(x, read=lambda x=x: 2 * x.read()[3:4], tokens=(3,)) if key.endswith("k_proj") else x
        for (n, key), x in dump.dumped.items()
    }
    wrong, notes = wrong_stages(LLAMA, replace(dump, dumped=rows))
    assert (wrong >= {"l0.q_rope", "l0.k_proj"}, notes) == (True, "")


def test_one_token_does_not_show_that_an_order_cancels():
    is_dumped = among("q_proj", "k_proj", "block_out")
    dump = permuted(dump_run(LLAMA, passes(LLAMA, 1), is_dumped=is_dumped), LLAMA, pair, PAIRED)
    wrong, notes = wrong_stages(LLAMA, dump)
    assert (wrong >= {"l0.q_proj", "l0.k_proj"}, notes) == (True, "")


def test_replay_of_a_right_dump_is_not_repeated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.diagnosis.search.file_orders.FileOrder.apply", None)
    assert wrong_stages(LLAMA, dump_run(LLAMA, passes(LLAMA), UNCHANGED)) == (set(), "")
