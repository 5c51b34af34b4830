"""The hyperparameters of an adapter: what is refused, which matrices it takes, rank and scale of each."""

import math

import pytest
from helpers.refusals import Refusal, refuses, row

from llorch.families.config import ModelConfig
from llorch.lora.config import LAYER_TARGETS, LoraConfig
from llorch.lora.targets import MatrixPart, targets_of


def test_targets_are_every_matrix_in_the_order_of_the_forward_pass(config: ModelConfig):
    names = list(targets_of(config))
    assert names[:2] == ["embed_tokens", "layers.0.q_proj"]
    assert names[-2:] == ["layers.2.down_proj", "lm_head"]
    assert len(names) == 2 + 7 * config.n_layers


def test_target_has_names_and_widths(config: ModelConfig):
    target = targets_of(config)["layers.1.o_proj"]
    assert (target.path, target.gguf) == ("model.layers.1.self_attn.o_proj", (MatrixPart("blk.1.attn_output"),))
    assert (target.n_in, target.n_out) == (config.q_width, config.hidden_size)
    embedding, head = targets_of(config)["embed_tokens"], targets_of(config)["lm_head"]
    assert (embedding.n_in, embedding.n_out, embedding.is_embedding) == (config.vocab_size, config.hidden_size, True)
    assert (head.n_in, head.n_out, head.weight) == (config.hidden_size, config.vocab_size, "embed_tokens")  # tied


def test_default_targets_are_all_seven_matrices_of_every_layer(config: ModelConfig):
    names = list(LoraConfig().targets(config))
    assert names == [f"layers.{layer}.{short}" for layer in range(config.n_layers) for short in LAYER_TARGETS]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"target_modules": ("q_proj", "lm_head")}, ["0.q_proj", "1.q_proj", "2.q_proj", "lm_head"]),
        ({"target_modules": r".*\.[12]\.mlp\.up_proj"}, ["1.up_proj", "2.up_proj"]),
        ({"target_modules": ("v_proj",), "layers_to_transform": (2,)}, ["2.v_proj"]),
        ({"target_modules": ("v_proj",), "exclude_modules": r".*layers\.0\..*"}, ["1.v_proj", "2.v_proj"]),
        ({"target_modules": ("k_proj", "up_proj"), "exclude_modules": ("k_proj",)}, [f"{i}.up_proj" for i in range(3)]),
    ],
)  # fmt: skip
def test_targets_are_chosen_as_peft_chooses_them(config: ModelConfig, chosen: dict, expected: list[str]):
    assert [name.removeprefix("layers.") for name in LoraConfig(**chosen).targets(config)] == expected


def test_unknown_module_is_an_error(config: ModelConfig):
    with refuses(ValueError, "c_attn", *LAYER_TARGETS, "embed_tokens", "lm_head", where="lora config"):
        LoraConfig(target_modules=("q_proj", "c_attn")).targets(config)
    with refuses(ValueError, r"target_modules 'transformer\\..*'", where="lora config"):
        LoraConfig(target_modules=r"transformer\..*").targets(config)
    with refuses(ValueError, "target_modules 'all-linear'", "layers_to_transform (9,)", where="lora config"):
        LoraConfig(layers_to_transform=(9,)).targets(config)


@pytest.mark.parametrize(
    ("idle", "message"),
    [
        ({"target_modules": ("q_proj", "lm_head"), "layers_to_transform": (0,)}, "target_modules 'lm_head'"),
        ({"target_modules": ("q_proj",), "exclude_modules": ("v_proj",)}, "exclude_modules 'v_proj'"),
        ({"exclude_modules": r"encoder\..*"}, r"exclude_modules 'encoder\\..*'"),
        ({"layers_to_transform": (0, 3, 9)}, "layers_to_transform 3, layers_to_transform 9"),  # and not 0
        ({"rank_pattern": {"qproj": 4}}, "rank_pattern 'qproj'"),
        ({"target_modules": ("q_proj",), "alpha_pattern": {"k_proj": 4.0, "q_proj": 2.0}}, "alpha_pattern 'k_proj'"),
    ],
)
def test_setting_that_matches_no_matrix_is_an_error_for_a_new_adapter(config: ModelConfig, idle: dict, message: str):
    with refuses(ValueError, where="lora config", got=f" {message};"):
        LoraConfig(**idle).require_effect(config)


def test_settings_that_match_a_matrix_are_accepted(config: ModelConfig):
    settings = LoraConfig(
        target_modules=("q_proj", "v_proj"), exclude_modules=("layers.0.self_attn.v_proj",), layers_to_transform=(0, 2),
        rank_pattern={r"layers\.2\..*": 3}, alpha_pattern={"v_proj": 1.0},
    )  # fmt: skip
    settings.require_effect(config)
    assert settings.targets(config).keys() == {"layers.0.q_proj", "layers.2.q_proj", "layers.2.v_proj"}


def test_the_scale_is_alpha_by_rank_or_by_its_root(config: ModelConfig):
    target = targets_of(config)["layers.0.q_proj"]
    assert LoraConfig(r=4, lora_alpha=6.0).scaling_of(target) == 1.5
    assert LoraConfig(r=4, lora_alpha=6.0, use_rslora=True).scaling_of(target) == 3.0


def test_pattern_sets_rank_and_alpha_of_matching_suffixes(config: ModelConfig):
    patterns = {"rank_pattern": {r"layers\.1\.self_attn\.q_proj": 9}, "alpha_pattern": {"q_proj": 6.0}}
    lora = LoraConfig(r=4, lora_alpha=8.0, use_rslora=True, **patterns)
    first, second = (targets_of(config)[f"layers.{layer}.q_proj"] for layer in (0, 1))
    assert (lora.rank_of(first), lora.rank_of(second)) == (4, 9)
    assert lora.scaling_of(second) == 6 / math.sqrt(9)
    assert lora.alpha_of(targets_of(config)["layers.1.k_proj"]) == 8


def test_first_matching_pattern_wins_with_all_its_alternatives(config: ModelConfig):
    lora = LoraConfig(r=8, rank_pattern={"q_proj|v_proj": 5, "o_proj|q_proj": 2, "proj|up_proj|k_": 3, "gate|mlp": 4})
    ranks = {name.rpartition(".")[2]: lora.rank_of(target) for name, target in lora.targets(config).items()}
    rest = {"k_proj": 8, "gate_proj": 8, "down_proj": 8}  # no alternative is the whole end of these paths
    assert ranks == {"q_proj": 5, "v_proj": 5, "o_proj": 2, "up_proj": 3} | rest


def test_pattern_with_catastrophic_backtracking_ends_or_is_refused(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
):
    with refuses(ValueError, "target_modules '(.*)*x'", where="lora config"):
        LoraConfig(target_modules="(.*)*x").targets(config)
    monkeypatch.setattr("llorch.lora.config._MATCH_SECONDS", 0.5)  # model.embed_tokens takes 0.03 to 0.07
    slow = r"(?:\w|[a-z.]|.)*m"
    for wrong in (LoraConfig(target_modules=slow), LoraConfig(rank_pattern={slow: 4})):
        settings = ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern")
        with refuses(ValueError, r"(?:\\w|[a-z.]|.)*m", *settings, "model.layers.0.self_attn.q_proj", "0.5 s"):
            wrong.require_effect(config)


@pytest.mark.parametrize(
    "refusal",
    [
        row("r=0", lambda: LoraConfig(r=0), ValueError, 1, where="r", got=0),
        row("r=True", lambda: LoraConfig(r=True), ValueError, 1, where="r", got=True),
        row("rank_pattern", lambda: LoraConfig(rank_pattern={"q_proj": 0}), ValueError, 1,
            where="rank_pattern q_proj", got=0),
        row("alpha=nan", lambda: LoraConfig(lora_alpha=math.nan), ValueError, 0, where="lora_alpha", got=math.nan),
        row("alpha=0", lambda: LoraConfig(lora_alpha=0.0), ValueError, 0, where="lora_alpha", got=0.0),
        row("alpha_pattern", lambda: LoraConfig(alpha_pattern={"q_proj": math.inf}), ValueError, 0,
            where="alpha_pattern q_proj", got=math.inf),
        row("dropout", lambda: LoraConfig(lora_dropout=1.0), ValueError, 0, 1, where="lora_dropout", got=1.0),
        row("no module", lambda: LoraConfig(target_modules=()), ValueError, where="target_modules", got="none"),
        row("no pattern", lambda: LoraConfig(target_modules="(q_proj"), ValueError, "'(q_proj'", "position 0"),
    ],
)  # fmt: skip
def test_invalid_number_is_refused(refusal: Refusal):
    refusal.check()
