"""The draft of a mapping: it is read again, and what was meant is found."""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from string import ascii_lowercase

import numpy as np
import pytest
from builders.raw_dumps import golden_trace, raw_array, raw_dump, weights_of
from helpers.refusals import assert_tells

from llorch.engines.dumps.mapping import mapping_of
from llorch.engines.dumps.raw import RawArray, RawDump
from llorch.engines.dumps.stage_mapping import stage_dump
from llorch.engines.dumps.suggest_mapping import suggest
from llorch.files.tensor_names import interleave
from llorch.stages.stage_ref import Tokens
from llorch.stages.table import STAGES, keys

MODEL = "micro-llama3"  # twelve heads, and twelve tokens: shapes do not tell
IDS, TRACE = golden_trace(MODEL, "transformers")
WEIGHTS = weights_of(MODEL)
CONFIG = WEIGHTS.config
LETTERS = (first + second for first in ascii_lowercase for second in ascii_lowercase)
NAMES = {stage.name: f"x{letters}" for stage, letters in zip(STAGES, LETTERS, strict=False)}  # they say nothing


def rename_trace(name: Callable[[str, int | None], str], *left_out: str) -> dict[str, np.ndarray]:
    return {name(stage.name, layer): TRACE[key] for key, stage, layer in keys(CONFIG) if stage.name not in left_out}


def in_layers(stage: str, layer: int | None, first: int = 0) -> str:
    return NAMES[stage] if layer is None else f"b{layer + first}.{NAMES[stage]}"


def check(arrays: Mapping[str, np.ndarray] | Sequence[RawArray], *expected_stages: str) -> str:
    """The draft names every wanted stage, and its values are those of the engine."""
    text = suggest(raw_dump(arrays, IDS), WEIGHTS)
    dump = stage_dump(raw_dump(arrays, IDS), CONFIG, mapping=mapping_of(tomllib.loads(text)), weights=WEIGHTS)
    assert {key for _, key in dump.dumped} == {*(expected_stages or TRACE)}, text
    for (_, key), dumped in dump.dumped.items():
        np.testing.assert_allclose(dumped.read(), TRACE[key], rtol=0, atol=1e-5, err_msg=f"{key}\n{text}")
    return text


@pytest.mark.parametrize(
    "name",
    [
        in_layers,
        lambda stage, layer: in_layers(stage, layer, 1),
        lambda stage, layer: NAMES[stage] + ("" if layer is None else f"_{layer}"),
        lambda stage, layer: ("2." if layer is None else f"2.{layer}.") + NAMES[stage],
        lambda stage, layer: NAMES[stage] if layer is None else f"{NAMES[stage]} of {'one two'.split()[layer]}",
    ],
    ids=["from 0", "from 1", "behind", "a second number", "no number"],
)
def test_every_name_is_found_by_values(name: Callable[[str, int | None], str]):
    text = check(rename_trace(name))
    assert text.count("1.0000 alike") == text.count(" alike")


def test_separately_declared_layers_are_used():
    check([raw_array(NAMES[s.name], TRACE[key], layer=layer) for key, s, layer in keys(CONFIG)])


def test_layouts_ambiguous_by_shape_are_drafted():
    arrays = rename_trace(in_layers, "q_proj", "k_proj", "v_proj", "ffn_gate", "ffn_up", "attn_scores")
    n, groups = len(IDS), CONFIG.n_kv_heads
    for i in range(CONFIG.n_layers):
        layer = {name: TRACE[f"l{i}.{name}"] for name in NAMES if f"l{i}.{name}" in TRACE}
        arrays[f"b{i}.{NAMES['q_rope']}"] = layer["q_rope"].swapaxes(0, 1)
        per_group = [layer[f"{letter}_proj"].reshape(n, groups, -1) for letter in "qkv"]
        arrays[f"b{i}.w"] = np.concatenate(per_group, -1).reshape(n, -1)
        arrays[f"b{i}.gu"] = np.stack([layer["ffn_gate"], layer["ffn_up"]], -1).reshape(n, -1)
        k = layer["k_cache"].repeat(CONFIG.group_size, 0)
        arrays[f"b{i}.s"] = layer["q_rope"].swapaxes(0, 1) @ k.swapaxes(1, 2)
    text = check(arrays)
    assert '"b{i}.s" = "kq"' in text
    assert '"b{i}.w" = ["q_proj", "k_proj", "v_proj"]' in text


def interleaved_queries(stage: str) -> dict[str, np.ndarray]:
    """Queries in the pairs of a Llama GGUF file."""
    arrays = {f"b{i}.{NAMES[stage]}": TRACE[f"l{i}.{stage}"] for i in range(CONFIG.n_layers)}
    return {
        name: interleave(array.reshape(-1), array.size // CONFIG.head_dim).reshape(array.shape)
        for name, array in arrays.items()
    }


def test_interleaving_is_a_layout_only_if_it_also_holds_after_rope():
    check(
        interleaved_queries("q_proj") | interleaved_queries("q_rope"),
        *(f"l{i}.{s}" for i in range(2) for s in ("q_proj", "q_rope")),
    )
    text = suggest(raw_dump(interleaved_queries("q_proj"), IDS), WEIGHTS)
    assert not mapping_of(tomllib.loads(text)).layouts["q_proj"].permuted
    assert '# permuted = "interleaved"  # only if RoPE' in text


def test_tiled_value_heads_are_drafted():
    weights, (ids, trace) = weights_of("micro-qwen3.5"), golden_trace("micro-qwen3.5", "transformers")
    z = trace["l0.z_in"].reshape(len(ids), 2, 3, -1).swapaxes(1, 2).reshape(len(ids), -1)
    raw = raw_dump({"b0.gate": z, "b0.rates": trace["l0.b_in"]}, ids)
    mapping = mapping_of(tomllib.loads(suggest(raw, weights)))
    dumped = stage_dump(raw, weights.config, mapping=mapping).dumped
    np.testing.assert_allclose(dumped[0, "l0.z_in"].read(), trace["l0.z_in"], rtol=0, atol=1e-5)
    assert (mapping.layouts["z_in"].tiled, "b_in" in mapping.layouts) == (True, False)


def test_stages_after_an_error_are_matched_by_write_order():
    rng = np.random.default_rng(0)
    arrays = rename_trace(in_layers)
    first_wrong = [*arrays].index(in_layers("attn_out", 0))
    for name in [*arrays][first_wrong:]:
        arrays[name] = (rng.permuted(arrays[name]) * 1.2).astype(np.float32)
    text = suggest(raw_dump(arrays, IDS), WEIGHTS)
    assert tomllib.loads(text)["names"] == {
        in_layers(s.name, layer).replace("b0", "b{i}"): s.name for _, s, layer in keys(CONFIG) if not layer
    }
    assert_tells(text, "shape and order")


def test_array_named_rotated_is_not_matched_to_the_projection():
    arrays = {f"b{i}.q_rotated": TRACE[f"l{i}.q_proj"] for i in range(CONFIG.n_layers)}
    text = suggest(raw_dump(arrays, IDS), WEIGHTS)
    assert re.search(r'"b{i}.q_rotated" = "q_rope"  # 0\.[0-9]{4} alike, in this order\n', text)


def test_second_pass_separates_the_cache_from_new_keys():
    weights, keys_of = weights_of("micro-llama"), golden_trace("micro-llama", "transformers")
    ids, trace = keys_of
    n = len(ids) - 1
    arrays = [(0, raw_array("b0.one", trace["l0.k_cache"][:, :n])), (1, raw_array("b0.one", trace["l0.k_cache"]))]
    arrays += [(0, raw_array("b0.two", trace["l0.k_rope"][:n])), (1, raw_array("b0.two", trace["l0.k_rope"][n:]))]
    text = suggest(RawDump("x", tuple(arrays), (Tokens(ids[:n]), Tokens(ids[n:], n))), weights)
    assert tomllib.loads(text)["names"] == {"b{i}.one": "k_cache", "b{i}.two": "k_rope"}


def test_tokens_are_found_in_embeddings_and_written_down():
    arrays = {"tok": TRACE["embed"], "fin": TRACE["final_norm"], "other": np.zeros((3, 7), np.float32)}
    text = suggest(raw_dump(arrays), WEIGHTS, first_position=2)
    values = tomllib.loads(text)
    assert values["names"] == {"tok": "embed", "fin": "final_norm"}
    assert mapping_of(values).passes == (Tokens(IDS, 2),)
    assert '# "other" = ""  # (3, 7)' in text
    assert_tells(text, "token ids", "in tok")


def test_constant_factor_is_noted_and_not_removed():
    assert '"a" = "l1.ffn_gate"  # 1.0000 alike' in check({"a": TRACE["l1.ffn_gate"]}, "l1.ffn_gate")
    assert "4 times ours" in suggest(raw_dump({"a": 4 * TRACE["l1.ffn_gate"]}, IDS), WEIGHTS)


@pytest.mark.parametrize("model", ["micro-qwen3.5", "micro-llama4"])
def test_suggest_names_every_stage_where_layers_differ(model: str):
    weights, (ids, trace) = weights_of(model), golden_trace(model, "transformers")
    stages = {key: stage for key, stage, _ in keys(weights.config)}
    arrays = {key.replace(stages[key].name, NAMES[stages[key].name]): array for key, array in trace.items()}
    text = suggest(raw_dump(arrays, ids), weights)
    dump = stage_dump(raw_dump(arrays, ids), weights.config, mapping=mapping_of(tomllib.loads(text)), weights=weights)
    assert {key for _, key in dump.dumped} == {*trace}, text
