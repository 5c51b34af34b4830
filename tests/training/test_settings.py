"""Settings of a training run: every field has a range, and files have one order of precedence and nothing unknown."""

import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.refusals import Refusal, refuses, row

from llorch.runtime.errors import MissingExtra
from llorch.training.settings import TrainSettings
from llorch.training.settings_file import read_settings, settings_from


def settings(**overrides: Any):
    values: dict[str, Any] = {"model": "story", "data": "pirate"} | overrides
    return TrainSettings(**values)


def refused(name: str, value: object, *facts: object, place: str = "", actual: object = ()) -> Any:
    """A row, named by the setting and its value; `where` is another name that the message has for it."""
    make = lambda: settings(**{name: value})  # noqa: E731
    return row(f"{name}={value}", make, ValueError, *facts, where=place or f"settings: {name}", got=actual)


ONE_OF = {  # names that a setting may have
    "init": ("default", "gaussian", "pissa"),
    "schedule": ("constant", "linear", "cosine"),
    "dtype": ("float32", "bfloat16", "float64"),
    "weights": ("decoded", "packed"),
}
REFUSED = [
    refused("r", 0, 1, actual=0),
    refused("alpha", 0.0, 0, place="lora_alpha", actual=0.0),
    refused("dropout", 1.0, 0, 1, actual=1.0),
    refused("dropout", float("nan"), 0, 1, actual="nan"),
    refused("valid", 1.0, 0, 1, actual=1.0),
    refused("init", "zeros", *ONE_OF["init"], actual="'zeros'"),
    refused("lr", 0.0, 0, actual=0.0),
    refused("lr", float("inf"), 0, actual="inf"),
    refused("lora_plus_ratio", -1.0, 0, actual=-1.0),
    refused("schedule", "step", *ONE_OF["schedule"], actual="'step'"),
    refused("warmup_steps", -1, 0, actual=-1),
    refused("warmup_ratio", 1.1, 0, 1, actual=1.1),
    row("two warm-ups", lambda: settings(warmup_steps=3, warmup_ratio=0.1), ValueError, "warmup_steps", "warmup_ratio",
        where="settings", got=(3, 0.1)),
    refused("weight_decay", -0.1, 0, actual=-0.1),
    refused("max_grad_norm", float("nan"), 0, actual="nan"),
    refused("epochs", 0, 1, actual=0),
    refused("epochs", None, 1, actual=None),
    refused("init", None, *ONE_OF["init"], actual=None),
    refused("steps", 0, 1, actual=0),
    refused("batch_size", 0, 1, actual=0),
    refused("accumulation", 0, 1, actual=0),
    refused("max_length", 1, 2, actual=1),
    refused("label_smoothing", 1.0, 0, 1, actual=1.0),
    refused("chunk", -1, 0, actual=-1),
    refused("exclude_modules", "(", "position 0", place="lora config: '('"),
    refused("dtype", "float16", *ONE_OF["dtype"], actual="'float16'"),
    refused("weights", "auto", *ONE_OF["weights"], actual="'auto'"),
    refused("eval_every", -1, 0, actual=-1),
    refused("save_every", -1, 0, actual=-1),
    refused("keep", 0, 1, actual=0),
    refused("seed", -1, 0, actual=-1),
    refused("seed", 1 << 63, 0, 1 << 63, actual=1 << 63),
]  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSED)
def test_a_value_out_of_range_is_refused_by_name(refusal: Refusal):
    refusal.check()


def test_defaults_are_valid_and_leave_open_only_what_model_and_device_decide():
    filled = settings().with_defaults(hidden_size=4096, context=512)
    assert (filled.lr, filled.dtype, filled.max_length) == (2e-4, "float32", 512)
    assert filled.with_defaults(hidden_size=64, context=8) == filled
    assert settings().with_defaults(hidden_size=64, context=4096).max_length == 1024
    assert settings().rate_for(1024) == pytest.approx(8e-4)  # narrower models learn faster
    assert settings(lr=0.5).rate_for(1024) == 0.5
    assert settings(device="cuda:1").dtype_name == "bfloat16"
    assert settings(device="cuda", dtype="float32").dtype_name == "float32"


@pytest.mark.parametrize(
    ("overrides", "steps"), [({}, 5), ({"warmup_steps": 0}, 0), ({"warmup_steps": 7}, 7), ({"warmup_ratio": 0.105}, 11)]
)
def test_warm_up_is_a_number_of_steps_or_a_share_of_them(overrides: dict[str, Any], steps: int):
    assert settings(**overrides).warmup_for(100) == steps


def test_default_warmup_keeps_at_least_one_training_step():
    assert [settings().warmup_for(total) for total in (1, 2, 20, 21)] == [0, 1, 1, 2]
    assert settings(warmup_ratio=0.05).warmup_for(1) == 1


def test_settings_reach_the_configuration_of_the_adapter():
    lora = settings(r=3, alpha=5.0, target_modules=("q_proj",), dropout=0.25, rslora=True, dora=True).lora
    assert (lora.r, lora.lora_alpha, lora.target_modules, lora.lora_dropout) == (3, 5.0, ("q_proj",), 0.25)
    assert lora.use_rslora
    assert lora.use_dora
    choice = {"exclude_modules": ("v_proj",), "layers_to_transform": (0, 2)}
    patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 8.0}}
    lora = settings(**choice, **patterns).lora
    assert {name: getattr(lora, name) for name in (*choice, *patterns)} == choice | patterns


def test_settings_reach_the_data():
    data = settings(max_length=77, packing=True, train_on="last", parse_special=True).data_settings
    assert (data.max_length, data.packing, data.train_on, data.parse_special) == (77, True, "last", True)


BOTH = {"model": "story", "data": "pirate"}


def merged(*sources: dict[str, Any]):
    return settings_from(*((f"source {number}", source) for number, source in enumerate(sources)))


def read(path: Path, text: str):
    path.write_text(text)
    return read_settings(path)


def test_a_later_source_wins_and_others_keep_what_it_does_not_say():
    found = merged(BOTH | {"r": 4, "lr": 0.1}, {"lr": 0.2, "alpha": 3.0}, {"alpha": 7.0})
    assert (found.model, found.r, found.lr, found.alpha) == ("story", 4, 0.2, 7.0)


def test_names_may_be_written_as_on_the_command_line():
    assert merged(BOTH | {"batch-size": 3}).batch_size == 3


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("qqq", ("lr", "batch_size", "dropout")),  # all that are known
        ("learning_rate", ("--lr",)),  # as other trainers call it
        ("batchsize", ("batch_size",)),
        ("lora_dropout", ("--dropout",)),
    ],
    ids=["qqq", "learning_rate", "batchsize", "lora_dropout"],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(name: str, hint: tuple[str, ...]):
    with refuses(ValueError, f"'{name}'", *hint, where="source 1") as caught:
        merged(BOTH, {name: 1})
    assert ("lr," in str(caught.value)) == (name == "qqq")


@pytest.mark.parametrize(
    ("source", "setting", "kind", "actual"),
    [
        ({"r": 4.0}, "r", "whole", 4.0),
        ({"r": True}, "r", "whole", True),
        ({"lr": "fast"}, "lr", "number", "'fast'"),
        ({"lr": False}, "lr", "number", False),
        ({"packing": 1}, "packing", "true", 1),
        ({"schedule": 3}, "schedule", "text", 3),
        ({"epochs": None}, "epochs", "whole", None),
        ({"target_modules": [1]}, "target_modules", "names", [1]),
        ({"alpha": 10**400}, "alpha", "number", 10**400),
        ({"exclude_modules": [""]}, "exclude_modules", "names", [""]),
        ({"layers": "7-4"}, "layers_to_transform", "0,4-7", "'7-4'"),
        ({"layers": "-1"}, "layers_to_transform", "0,4-7", "'-1'"),
        ({"layers": [0, True]}, "layers_to_transform", "0,4-7", [0, True]),
        ({"layers": []}, "layers_to_transform", "0,4-7", []),
        ({"rank_pattern": "q_proj=8"}, "rank_pattern", "q_proj: 8", "'q_proj=8'"),
        ({"rank_pattern": {"q_proj": 8.0}}, "rank_pattern q_proj", "whole", 8.0),
        ({"rank_pattern": {3: 8}}, "rank_pattern", "q_proj: 8", {3: 8}),
        ({"alpha_pattern": {"q_proj": "much"}}, "alpha_pattern q_proj", "number", "'much'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_value_of_the_wrong_kind_is_refused_with_its_source(
    source: dict[str, Any], setting: str, kind: str, actual: object
):
    with refuses(ValueError, kind, where=("source 1: ", setting), got=actual):
        merged(BOTH, source)


def test_model_and_data_must_come_from_somewhere():
    with refuses(ValueError, "model", "data"):
        merged({"r": 4})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("q_proj,v_proj", ("q_proj", "v_proj")),
        ("q_proj", ("q_proj",)),
        ("self_attn.q_proj, lm_head", ("self_attn.q_proj", "lm_head")),
        ("all-linear", "all-linear"),
        (r".*\.[02]\..*_proj", r".*\.[02]\..*_proj"),
        (["q_proj", "v_proj"], ("q_proj", "v_proj")),
    ],
)
def test_target_modules_are_names_or_a_pattern(value: Any, expected: object):
    assert merged(BOTH | {"target_modules": value}).target_modules == expected


def test_target_parameters_are_names():
    found = merged(BOTH | {"target_modules": "", "target_parameters": "experts.down_proj, gate.weight"})
    assert found.lora.target_parameters == ("experts.down_proj", "gate.weight")
    assert not found.lora.target_modules
    with refuses(ValueError, "names", where="target_parameters", got="'.*'"):
        merged(BOTH | {"target_parameters": ".*"})
    with refuses(ValueError, "lora_dropout", "target_parameters", "PEFT"):
        merged(BOTH | {"target_parameters": ["gate.weight"], "dropout": 0.1})


@pytest.mark.parametrize(
    ("value", "expected"), [("0", (0,)), ("3, 0, 5-7", (0, 3, 5, 6, 7)), ([2, 0, 2], (0, 2)), (None, None)]
)
def test_layers_are_numbers_or_ranges(value: Any, expected: object):
    assert merged(BOTH | {"layers": value}).layers_to_transform == expected
    assert merged(BOTH | {"layers_to_transform": value}).layers_to_transform == expected


def test_patterns_keep_their_order_and_a_later_source_replaces_them(tmp_path: Path):
    yaml = read(tmp_path / "a.yaml", "rank_pattern: {v_proj: 2, '.*_proj': 4}\nalpha_pattern:\n  q_proj: 1e1\n")
    toml = read(tmp_path / "a.toml", '[rank_pattern]\nv_proj = 2\n".*_proj" = 4\n[alpha_pattern]\nq_proj = 10\n')
    assert merged(BOTH, dict(yaml)) == merged(BOTH, dict(toml))
    found = merged(BOTH, dict(yaml), {"alpha_pattern": {"k_proj": 3}})
    assert list(found.rank_pattern.items()) == [("v_proj", 2), (".*_proj", 4)]
    assert found.alpha_pattern == {"k_proj": 3.0}


def test_yaml_and_toml_say_the_same(tmp_path: Path):
    yaml = read(tmp_path / "a.yaml", "r: 4\nlr: 1e-4\npacking: true\ntarget_modules: [q_proj]\ndtype: null\n")
    toml = read(tmp_path / "a.toml", 'r = 4\nlr = 1e-4\npacking = true\ntarget_modules = ["q_proj"]\n')
    assert merged(BOTH, dict(yaml)) == merged(BOTH, dict(toml))
    assert merged(BOTH, dict(yaml)).lr == 1e-4


def test_what_settings_say_of_themselves_is_read_back():
    chosen = {"layers": "0-1", "exclude_modules": "k_proj", "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"a": 1}}
    found = merged(BOTH | {"target_modules": "q_proj,k_proj", "lr": 0.25, "dora": True} | chosen)
    assert merged(found.as_json()) == found


@pytest.mark.parametrize(
    ("name", "text", "code", "facts"),
    [
        ("a.yaml", "r: 4\nr: 8\n", "Malformed", ("'r'", "twice")),
        ("a.yaml", "r: [4\n", "Malformed", ("','", "']'")),
        ("a.yaml", "- r\n- alpha\n", "Malformed", ("names", "values")),
        ("a.yaml", "3: 4\n", "Malformed", ("names", "values")),
        ("a.yaml", "model: !!python/object:os.system x\n", "Malformed", ("constructor", "os.system")),
        ("a.toml", "r = \n", "Malformed", ("value", "line 1")),
        ("a.json", "{}", "Unsupported", (".yaml", ".yml", ".toml", "got '.json'")),
    ],
    ids=["twice", "no YAML", "list", "number", "object", "no TOML", "JSON"],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, name: str, text: str, code: str, facts: tuple[str, ...]):
    with refuses(code, *facts, where=tmp_path / name) as caught:
        read(tmp_path / name, text)
    assert "\n" not in str(caught.value)


def test_an_empty_file_says_nothing(tmp_path: Path):
    assert read(tmp_path / "a.yml", "") == {}


def test_without_pyyaml_a_yaml_file_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with refuses(MissingExtra, "llorch[train]"):
        read(tmp_path / "a.yaml", "r: 4\n")
