import re

import pytest

from llorch.builtin import BUILTIN, builtin_path
from llorch.config import ModelConfig
from llorch.files import open_weights
from llorch.stages import BY_NAME, CHECKPOINTS, STAGES, Stage, forward_order, input_key, keys

# The numbers are public interface; here they stand once more, as design states them.
NUMBERED = {
    "00": "embed", "01": "attn_norm ffn_norm final_norm", "01b": "q_rope k_rope",
    "02": "q_proj k_proj v_proj q_norm k_norm", "03": "k_cache v_cache", "04": "attn_scores attn_probs",
    "05": "attn_context attn_out attn_residual", "06": "ffn_gate ffn_up ffn_act ffn_out", "07": "block_out",
    "08": "logits",
}  # fmt: skip


@pytest.fixture(scope="module", params=BUILTIN)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return open_weights(builtin_path(request.param)).config


def test_names_are_unique_and_checkpoints_exist():
    assert len(BY_NAME) == len(STAGES)
    assert {stage.checkpoint for stage in STAGES} <= CHECKPOINTS.keys()


def test_every_stage_belongs_to_the_checkpoint_that_design_states():
    table = {number: {s.name for s in STAGES if s.checkpoint == number} for number in CHECKPOINTS}
    assert {number: names for number, names in table.items() if names} == {
        n: set(s.split()) for n, s in NUMBERED.items()
    }
    assert list(CHECKPOINTS) == "00 01 01b 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 17 18 19 20".split()


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_stage_reads_what_its_formula_names(stage: Stage):
    named = set(re.findall(r"\w+", stage.formula)) & {*BY_NAME, "block_in"} - {stage.name}
    assert named <= set(stage.inputs)


def test_every_input_comes_before_the_stage_that_reads_it(config: ModelConfig):
    seen: set[str] = set()
    for key, stage, layer in keys(config):
        assert {input_key(name, layer, config) for name in stage.input_names(config)} <= seen
        seen.add(key)


def test_query_and_key_norms_belong_to_models_that_have_them(config: ModelConfig):
    assert ("l0.q_norm" in {key for key, _, _ in keys(config)}) == config.qk_norm


def test_shuffled_keys_are_put_back_in_order_and_foreign_ones_come_last_as_they_came(config: ModelConfig):
    want = [key for key, _, _ in keys(config)]
    foreign = ["mine", "lx.q_proj", "l0.logits", "q_proj", ".embed", "a"]
    assert forward_order([*foreign, *sorted(want)]) == [*want, *foreign]
    assert forward_order(["l10.q_proj", "l9.q_proj"]) == ["l9.q_proj", "l10.q_proj"]
