"""Settings of a training run: every field has a range, and a refusal names the field and the value."""

from typing import Any

import pytest
from helpers.refusals import Refusal, row

from llorch.training.settings import TrainSettings


def settings(**given: Any):
    values: dict[str, Any] = {"model": "story", "data": "pirate"} | given
    return TrainSettings(**values)


def refused(name: str, value: object, *facts: object, where: str = "", actual: object = ()) -> Any:
    """A row, named by the setting and its value; `where` is another name that the message has for it."""
    make = lambda: settings(**{name: value})  # noqa: E731
    return row(f"{name}={value}", make, ValueError, *facts, where=where or f"settings: {name}", got=actual)


ONE_OF = {  # names that a setting may have
    "init": ("default", "gaussian", "pissa"),
    "schedule": ("constant", "linear", "cosine"),
    "dtype": ("float32", "bfloat16", "float64"),
    "weights": ("decoded", "packed"),
}
REFUSED = [
    refused("r", 0, 1, actual=0),
    refused("alpha", 0.0, 0, where="lora_alpha", actual=0.0),
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
    refused("exclude_modules", "(", "position 0", where="lora config: '('"),
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
    ("given", "steps"), [({}, 5), ({"warmup_steps": 0}, 0), ({"warmup_steps": 7}, 7), ({"warmup_ratio": 0.105}, 11)]
)
def test_warm_up_is_a_number_of_steps_or_a_share_of_them(given: dict[str, Any], steps: int):
    assert settings(**given).warmup_for(100) == steps


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
