"""Whether the numbers of a dump may be compared: what is of another run is refused, what an engine did wrong is not."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.raw_dumps import golden_trace, raw_dump, weights_of
from helpers.refusals import assert_tells, refuses

from llorch.diagnosis.guards import read_comparable, require_comparable
from llorch.engines.dumps.raw import RawDump, digest
from llorch.engines.dumps.stage_dump import DumpedArray, Features, StageDump
from llorch.engines.dumps.stage_mapping import stage_dump
from llorch.engines.dumps.writers.dump_writer import DumpWriter
from llorch.files import Weights
from llorch.files.tensor_names import inventory
from llorch.ops.linear import linear
from llorch.ops.rms_norm import rms_norm
from llorch.ops.rounding import round_activations
from llorch.runtime.builtin import BUILTIN
from llorch.runtime.errors import GuardFailed
from llorch.stages.stage_ref import Tokens

NAME = "micro-llama"
WEIGHTS = weights_of(NAME)
IDS, TRACE = golden_trace(NAME, "transformers")
LAST = f"l{WEIGHTS.config.n_layers - 1}.block_out"
Arrays = Mapping[str, np.ndarray]


def dump_of(arrays: Arrays, *, ids: tuple[int, ...] = IDS, first_position: int = 0, **features: Any) -> StageDump:
    return StageDump.of_arrays([Tokens(ids, first_position)], arrays, source="mine", **features)


def bf16(array: np.ndarray) -> np.ndarray:
    return round_activations(array, "BF16")


@pytest.mark.slow_cases("micro-qwen3-llamacpp", "micro-qwen3-transformers", "story-llamacpp", "story-transformers")
@pytest.mark.parametrize("engine", ["llamacpp", "transformers"])
@pytest.mark.parametrize("name", BUILTIN)
def test_the_run_of_an_engine_is_compared_without_a_note(name: str, engine: str):
    weights, (ids, trace) = weights_of(name), golden_trace(name, engine)
    hashes = {}
    for ours, weight in inventory(weights.config).items():
        told = digest(weights.array(ours))
        hashes |= {weight.gguf: told, weight.huggingface: told, f"base_model.model.{weight.huggingface}": told}
    hashes |= {"lm_head.weight": digest(weights.array("lm_head" if "lm_head" in weights else "embed_tokens"))}
    dump = dump_of(trace, ids=ids)
    assert notes_of(dump, weights, ids=ids, first_position=0, hashes=hashes) == []
    rounded = {key: bf16(array) for key, array in trace.items()}
    assert notes_of(dump_of(rounded, ids=ids, dtype="bfloat16"), weights) == []


def notes_of(dump: StageDump, weights: Weights = WEIGHTS, **options: Any) -> list[str]:
    return [*require_comparable(dump, weights, **options).notes]


def refused(guard: str, dump: StageDump, *facts: object, options: Mapping[str, Any] = {}, **fields: object) -> None:
    with refuses(GuardFailed, *facts, **fields) as caught:
        require_comparable(dump, WEIGHTS, **options)
    assert caught.value.guard == guard
    assert str(caught.value).startswith(f"mine: {guard}: ")


OTHER_IDS: dict[str, tuple[tuple[int, ...], str, str]] = {  # what the dump got, and how it comes of the right ones
    "first token twice": ((IDS[0], *IDS), "13 tokens (1 1 335", "twice"),
    "a token in front": ((9, *IDS), "13 tokens (9 1 335", "9 comes"),
    "padded behind": ((*IDS, 0, 0, 0), "15 tokens (1 335", "3 times 0"),
    "padded in front": ((0, 0, *IDS), "14 tokens (0 0 1 335", "2 times 0"),
    "another token": ((*IDS[:5], 7, *IDS[6:]), "12 tokens (1 335 376 378 400 7", "token 5"),
    "cut": (IDS[:-2], "10 tokens (1 335", "token 10"),
}


@pytest.mark.parametrize(("ids", "actual", "difference"), OTHER_IDS.values(), ids=OTHER_IDS)
def test_tokens_that_are_not_those_of_the_user_are_refused(ids: tuple[int, ...], actual: str, difference: str):
    wanted = "12 tokens (1 335 376 378 400 394 389 280 ...)"
    refused("ids", dump_of({}, ids=ids), options={"ids": IDS}, expected=wanted, got=(actual, difference))


OTHER_ORDERS: dict[str, tuple[tuple[int, ...], str, str]] = {
    "first token twice": ((0, *range(11)), "12 tokens (1 1 335", "twice"),
    "two swapped": ((0, 2, 1, *range(3, 12)), "12 tokens (1 376 335", "token 1"),
    "a token in front": ((3, *range(11)), "12 tokens (378 1 335", "378 comes"),
}


@pytest.mark.parametrize(("order", "actual", "difference"), OTHER_ORDERS.values(), ids=OTHER_ORDERS)
def test_embeddings_of_other_tokens_than_those_that_are_said_are_refused(
    order: tuple[int, ...], actual: str, difference: str
):
    wanted = ("12 tokens (1 335 376", "pass 0")
    refused("ids", dump_of({"embed": TRACE["embed"][list(order)]}), expected=wanted, got=(actual, difference))
    some = DumpedArray("embed", "float32", lambda: bf16(TRACE["embed"][list(order)][1:3]), (1, 2))
    if order[1] != 1:
        dump = StageDump("mine", (Tokens(IDS),), {(0, "embed"): some})
        refused("ids", dump, expected=("2 tokens (335 376)", "pass 0"))


TABLE = WEIGHTS.array("embed_tokens")


@pytest.mark.parametrize(
    "wrong",
    [
        TABLE[(np.array(IDS) + 1) % len(TABLE)], 11 * TABLE[list(IDS)], np.full_like(TRACE["embed"], np.nan),
        TABLE.reshape(TABLE.shape[::-1])[:, list(IDS)].T, WEIGHTS.array("lm_head")[list(IDS)],
        TABLE[np.array(IDS) % 256],
    ],
)  # fmt: skip
def test_a_wrong_lookup_of_the_right_tokens_is_left_to_the_diagnosis(wrong: np.ndarray):
    assert notes_of(dump_of({"embed": wrong}), WEIGHTS) == []


def test_positions_that_do_not_follow_are_refused():
    moved = dump_of({}, first_position=7)
    refused("positions", moved, options={"first_position": 0}, expected=0, got=7)
    refused("positions", StageDump("mine", (Tokens(IDS), Tokens((3,))), {}), expected=("pass 1", 12), got=0)
    most = WEIGHTS.config.max_position_embeddings
    refused("positions", dump_of({}, first_position=most - 10), expected=most, got=most + 2)
    assert notes_of(moved, WEIGHTS) == []


@pytest.mark.parametrize("key", ["l1.k_cache", "l0.attn_scores"])
def test_a_cache_of_more_tokens_than_the_dump_tells_of_is_refused(key: str):
    part = TRACE[key] if "cache" in key else TRACE[key][:, 4:]
    dump = dump_of({key: part}, ids=IDS[4:], first_position=4)
    refused("positions", dump, "cache", where=(key, "pass 0"), expected="ctx=8", got=(str(part.shape), 12))


MISFITS: dict[str, tuple[str, np.ndarray, tuple[str, ...], tuple[str, ...]]] = {  # facts, those behind "got"
    "axes turned": (
        "l0.q_rope", TRACE["l0.q_rope"].swapaxes(0, 1), ("pass 0", "seq=12, heads=6, head_dim=32"), ("(6, 12, 32)",)
    ),
    "a batch": ("l0.q_rope", TRACE["l0.q_rope"][None], ("pass 0", "seq=12"),
                ("(1, 12, 6, 32)", "llorch.engines.dumps.stage_mapping")),
    "tokens left out": ("l0.attn_probs", TRACE["l0.attn_probs"][:, :5], ("pass 0", "seq=12, ctx=12"), ("(6, 5, 12)",)),
    "a stage of another family": ("l0.q_norm", TRACE["l0.q_rope"], ("stage",), ("l0.q_norm",)),
    "a layer too far": ("l9.block_out", TRACE[LAST], ("stage",), ("l9.block_out",)),
}  # fmt: skip


@pytest.mark.parametrize(("key", "array", "facts", "actual"), MISFITS.values(), ids=MISFITS)
def test_an_array_that_does_not_fit_its_stage_is_refused(
    key: str, array: np.ndarray, facts: tuple[str, ...], actual: tuple[str, ...]
):
    refused("layout", dump_of({"embed": TRACE["embed"], key: array}), key, *facts, got=actual)


EPS, GAIN = WEIGHTS.config.rms_norm_eps, WEIGHTS.array("final_norm")
BARE = TRACE["l1.attn_norm"] / WEIGHTS.array("layers.1.attn_norm")
IN = TRACE["l1.attn_residual"]
OUT, NORMED = TRACE[LAST], TRACE["final_norm"]
TWICE = rms_norm(NORMED, GAIN, eps=EPS)


def head(x: np.ndarray) -> np.ndarray:
    return linear(x, WEIGHTS.array("lm_head"))


ELSEWHERE: dict[str, tuple[Arrays, str, str]] = {  # which array, and how it looks
    "normed alone": ({LAST: NORMED}, LAST, "after"),
    "normed beside the norm": ({LAST: NORMED, "final_norm": NORMED}, LAST, "after"),
    "normed beside logits": ({LAST: NORMED, "logits": TRACE["logits"]}, LAST, "after"),
    "final norm not normed": ({LAST: OUT, "final_norm": OUT, "logits": TRACE["logits"]}, "final_norm", "input"),
    "without gain": ({"l1.attn_norm": BARE, "l1.k_proj": TRACE["l1.k_proj"]}, "l1.attn_norm", "gain"),
    "norm not normed": (
        {"l1.ffn_norm": IN, "l1.attn_residual": IN, "l1.ffn_up": TRACE["l1.ffn_up"]}, "l1.ffn_norm", "input"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("arrays", "which", "looks"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_row_at_the_other_side_of_a_norm_than_its_name_says_is_refused(arrays: Arrays, which: str, looks: str):
    for shown in (arrays, {key: bf16(array) for key, array in arrays.items()}):
        refused("norm", dump_of(shown), expected=which, got=("pass 0", looks))


@pytest.mark.parametrize(
    "arrays",
    [
        {LAST: OUT, "final_norm": OUT, "logits": head(OUT)},
        {LAST: NORMED, "final_norm": TWICE, "logits": head(TWICE)},
        {LAST: NORMED, "logits": head(TWICE)},
        {LAST: NORMED[:1]},
        {"l1.attn_norm": BARE, "l1.q_proj": linear(BARE, WEIGHTS.array("layers.1.q_proj"))},
        {"l0.attn_norm": TRACE["embed"], "embed": TRACE["embed"],
         "l0.v_proj": linear(TRACE["embed"], WEIGHTS.array("layers.0.v_proj"))},
    ],
)  # fmt: skip
def test_a_norm_that_the_engine_left_out_or_made_twice_is_left_to_the_diagnosis(arrays: Arrays):
    n_tokens = len(next(iter(arrays.values())))
    assert notes_of(dump_of(arrays, ids=IDS[:n_tokens]), WEIGHTS) == []


@pytest.mark.parametrize("odd", [np.inf, np.nan, 1e38])
def test_numbers_that_ran_away_are_left_to_the_diagnosis(odd: float):
    arrays = {key: np.where(array > 1, np.float32(odd), 1e30 * array) for key, array in TRACE.items()}
    assert notes_of(dump_of(arrays), WEIGHTS) == []


def test_where_nothing_was_made_of_it_a_norm_that_looks_left_out_is_noted():
    (note,) = notes_of(dump_of({LAST: OUT, "final_norm": OUT}), WEIGHTS)
    assert_tells(note, "norm: final_norm")


def in_production(logits: np.ndarray, *, tokens: tuple[int, ...] | None = None, **features: Any) -> StageDump:
    dumped = {(0, "logits"): DumpedArray("logits", "float32", lambda: TRACE["logits"])}
    unwatched = {0: DumpedArray("production_logits", "float32", lambda: logits, tokens)}
    return StageDump("mine", (Tokens(IDS),), dumped, Features(**features), (), unwatched)


def test_a_capture_that_is_not_the_run_in_production_is_refused():
    noise = 1 + 1e-3 * np.random.default_rng(0).standard_normal(TRACE["logits"].shape, np.float32)
    assert notes_of(in_production(TRACE["logits"]), WEIGHTS) == []
    assert notes_of(in_production(TRACE["logits"][-1:], tokens=(11,)), WEIGHTS) == []
    for dump, error in (
        (in_production(TRACE["logits"] * noise, dtype="bfloat16"), r"\d\.\de-0[34]"),
        (in_production(TRACE["logits"] * (1 + (noise - 1) / 2)), r"[45]\.\de-04"),
    ):
        (note,) = notes_of(dump, WEIGHTS)
        assert_tells(note, "run: logits", "token 0", "pass 0")
        assert re.search(error, note)
    arithmetics: list[dict[str, Any]] = [{"kv_cache": "float16"}, {"flash_attention": True}, {"activations": "Q8_0"}]
    for wider in [*arithmetics, {"kv_cache": "int8-row"}]:
        assert len(notes_of(in_production(TRACE["logits"] * noise, **wider), WEIGHTS)) == 1
    noisy = in_production(TRACE["logits"] * noise)
    refused("run", noisy, expected=("logits", "token 0", "pass 0"), got=("error", "path"))
    one_late = in_production(TRACE["logits"][10:11], tokens=(11,))
    refused("run", one_late, expected=("token 11", "pass 0"), got=("token 10", "first"))
    production = {0: DumpedArray("p", "float32", lambda: TRACE["logits"])}
    assert notes_of(StageDump("mine", (Tokens(IDS),), {}, production=production), WEIGHTS) == []


@pytest.mark.parametrize(
    ("guard", "options", "expected", "actual"),
    [
        ("ids", {"ids": (1, 2)}, "2 tokens (1 2)", ("12 tokens", "token 1")),
        ("positions", {"ids": IDS, "first_position": 3}, 3, 0),
        ("layout", {}, "seq=12 hidden=96", "(7, 7)"),
    ],
    ids=["ids", "positions", "layout"],
)
def test_a_guard_may_fail_as_soon_as_names_are_read(
    guard: str, options: dict[str, Any], expected: object, actual: object
):
    arrays = {"embed": TRACE["embed"] if options else np.ones((7, 7), np.float32)}
    with refuses(GuardFailed, expected=expected, got=actual, where=f"dump: {guard}") as caught:
        stage_dump(raw_dump(arrays, IDS), WEIGHTS.config, **options)
    assert caught.value.guard == guard


def test_passes_that_do_not_follow_are_refused_before_their_caches_are_read():
    raw = RawDump("dump", raw_dump({"embed": TRACE["embed"]}).arrays, (Tokens(IDS), Tokens((3,))))
    with refuses(GuardFailed, where="dump: positions", expected=("pass 1", 12)):
        stage_dump(raw, WEIGHTS.config)


def written(folder: Path, arrays: Arrays, *, weights: Mapping[str, str] | None = None) -> Path:
    with DumpWriter(folder, weights=weights or {}) as writer:
        writer.begin(IDS)
        for name, array in arrays.items():
            writer.add(name, array)
    return folder


def test_read_comparable_notes_what_the_readers_and_the_guards_found(tmp_path: Path):
    path = written(tmp_path / "dump", {LAST: OUT, "final_norm": OUT, "mine": OUT})
    (tmp_path / "names.toml").write_text('[names]\n"mine" = "l0.attn_norm"\n')
    dump = read_comparable(path, WEIGHTS, ids=IDS, first_position=0)
    assert_tells(" | ".join(dump.notes), "left out 1 arrays", "norm: final_norm")
    mapped = read_comparable(path, WEIGHTS, mapping=tmp_path / "names.toml")
    assert (0, "l0.attn_norm") in mapped.dumped


def test_read_comparable_takes_the_ids_and_the_position_that_a_dump_lacks(tmp_path: Path):
    arrays: dict[str, Any] = {"l0.q_proj": TRACE["l0.q_proj"]}
    np.savez(tmp_path / "dump.npz", **arrays)
    dump = read_comparable(tmp_path / "dump.npz", WEIGHTS, ids=IDS, first_position=3)
    assert dump.passes == (Tokens(IDS, 3),)


@pytest.mark.parametrize(
    ("guard", "expected", "hashes", "options"),
    [
        ("ids", "given tokens", {}, {"ids": (1, 2)}),
        ("positions", "given position 4", {}, {"ids": IDS, "first_position": 4}),
        ("weights", "numbers of", {"blk.0.attn_q.weight": "0" * 64}, {}),
    ],
    ids=["ids", "positions", "weights"],
)
def test_read_comparable_refuses_what_contradicts_the_dump(
    guard: str, expected: str, hashes: dict[str, str], options: dict[str, Any], tmp_path: Path
):
    path = written(tmp_path / "dump", {"l0.q_proj": TRACE["l0.q_proj"]}, weights=hashes)
    with pytest.raises(GuardFailed, match=f"^{re.escape(str(path))}: {guard}: expected .*{expected}") as caught:
        read_comparable(path, WEIGHTS, **options)
    assert caught.value.guard == guard
