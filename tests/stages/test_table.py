import json
import lzma
import re
from pathlib import Path

import pytest

from llorch.families.config import ModelConfig
from llorch.files import open_weights
from llorch.judging.goldens.forward import ENGINES, SAMPLINGS, read_unsupported
from llorch.judging.goldens.store import SUFFIX
from llorch.runtime.builtin import BUILTIN, EVERY, builtin_path, goldens_folder
from llorch.stages.table import (
    BY_NAME,
    CHECKPOINTS,
    DENSE_PRODUCTS,
    FUSABLE,
    STAGES,
    Stage,
    forward_order,
    input_keys,
    keys,
)

# The numbers are public interface; here they stand once more, as design states them.
NUMBERED = {
    "00": "embed", "01": "attn_norm ffn_norm final_norm", "01b": "q_rope k_rope",
    "02": "q_proj q_gate_proj k_proj v_proj q_norm k_norm q_head_norm k_head_norm",
    "03": "k_cache v_cache conv_state delta_state", "04": "q_tempered attn_scores attn_probs",
    "05": "attn_context attn_gate attn_gated attn_out attn_residual",
    "05b": "qkv_in z_in b_in a_in conv_out q_l2 k_l2 beta log_decay delta_out gated_norm linear_out",
    "06": "ffn_gate ffn_up ffn_act ffn_out",
    "06b": "router_logits router_probs topk_ids topk_weights expert_in expert_gate expert_up expert_act expert_out "
    "shared_ffn_gate shared_ffn_up shared_ffn_act shared_gate shared_out moe_out",
    "07": "block_out", "08": "logits",
}  # fmt: skip


@pytest.fixture(scope="module", params=BUILTIN)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return open_weights(builtin_path(request.param)).config


def test_names_are_unique_and_checkpoints_exist():
    assert len(BY_NAME) == len(STAGES)
    assert {stage.checkpoint for stage in STAGES} <= CHECKPOINTS.keys()


def test_every_stage_belongs_to_the_checkpoint_that_design_states():
    table = {number: {s.name for s in STAGES if s.checkpoint == number} for number in CHECKPOINTS}
    numbered = {number: set(names.split()) for number, names in NUMBERED.items()}
    assert {number: names for number, names in table.items() if names} == numbered
    assert list(CHECKPOINTS) == "00 01 01b 02 03 04 05 05b 06 06b 07 08 09 10 11 12 13 14 15 16 17 18 19 20".split()


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_stage_reads_what_its_formula_names(stage: Stage):
    named = set(re.findall(r"\w+", stage.formula)) & {*BY_NAME, "block_in"} - {stage.name, stage.matrix}
    assert named <= {name for alternatives in stage.inputs for name in alternatives.split("|")}


def test_every_input_comes_before_the_stage_that_reads_it(config: ModelConfig):
    seen: set[str] = set()
    for key, stage, layer in keys(config):
        inputs = input_keys(stage, layer, config)
        assert len(inputs) == len([*stage.input_names(config, layer)])
        assert {*inputs} <= seen
        seen.add(key)


OTHERS = {"selected_logits", "generation", *(f"probabilities.{name}" for name in SAMPLINGS)}  # than stages


def nearest_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of stages from the header of a golden; decompressing its numbers takes longer."""
    with lzma.open(path) as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    shapes = {name.removeprefix("near/"): tuple(of["shape"]) for name, of in header.items() if name.startswith("near/")}
    return {name: shape for name, shape in shapes.items() if name not in OTHERS}


@pytest.mark.parametrize("model", EVERY)
def test_a_stage_has_the_shape_that_engines_give_it(model: str):
    config, folder = open_weights(builtin_path(model)).config, goldens_folder() / model
    n = len(json.loads((folder / "golden.json").read_text())["cases"]["near"]["ids"])
    goldens = [folder / f"{name}{SUFFIX}" for name in ENGINES if name not in read_unsupported(folder)]
    assert goldens
    for path in goldens:
        assert nearest_shapes(path) == {name: stage.shape(config, seq=n, ctx=n) for name, stage, _ in keys(config)}


def test_query_and_key_norms_belong_to_models_that_have_them(config: ModelConfig):
    assert ("l0.q_norm" in {key for key, _, _ in keys(config)}) == config.qk_norm


def test_dense_models_have_the_products_of_llama():
    found = {stage.name: (stage.dense_input, stage.matrix) for stage in DENSE_PRODUCTS}
    assert found == {
        "q_proj": ("attn_norm", "q_proj"), "k_proj": ("attn_norm", "k_proj"), "v_proj": ("attn_norm", "v_proj"),
        "attn_out": ("attn_context", "o_proj"), "ffn_gate": ("ffn_norm", "gate_proj"),
        "ffn_up": ("ffn_norm", "up_proj"), "ffn_out": ("ffn_act", "down_proj"), "logits": ("final_norm", "lm_head"),
    }  # fmt: skip
    assert (BY_NAME["q_norm"].dense_input, BY_NAME["final_norm"].dense_input) == ("q_proj", "last_block_out")
    for names in FUSABLE:  # they read one input
        assert len({found[name][0] for name in names}) == 1


def test_keys_are_sorted_in_forward_order_and_unknown_keys_come_last(config: ModelConfig):
    expected = [key for key, _, _ in keys(config)]
    foreign = ["mine", "lx.q_proj", "l0.logits", "q_proj", ".embed", "a"]
    assert forward_order([*foreign, *sorted(expected)]) == [*expected, *foreign]
    assert forward_order(["l10.q_proj", "l9.q_proj"]) == ["l9.q_proj", "l10.q_proj"]
