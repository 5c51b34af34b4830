"""Settings of a training run: every field has a range, and a refusal names the field and the value."""

from typing import Any

import pytest

from llorch.train.settings import TrainSettings


def settings(**given: Any):
    values: dict[str, Any] = {"model": "story", "data": "pirate"} | given
    return TrainSettings(**values)


REFUSED = [
    ({"r": 0}, "r must be at least 1, got 0"),
    ({"alpha": 0.0}, "lora_alpha must be finite and above 0, got 0.0"),
    ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
    ({"dropout": float("nan")}, "dropout must be at least 0 and below 1, got nan"),
    ({"valid": 1.0}, "valid must be at least 0 and below 1, got 1.0"),
    ({"init": "zeros"}, "init must be one of default, gaussian, pissa, got 'zeros'"),
    ({"lr": 0.0}, "lr must be finite and above 0, got 0.0"),
    ({"lr": float("inf")}, "lr must be finite and above 0, got inf"),
    ({"lora_plus_ratio": -1.0}, "lora_plus_ratio must be finite and above 0"),
    ({"schedule": "step"}, "schedule must be one of constant, linear, cosine, got 'step'"),
    ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
    ({"warmup_ratio": 1.1}, "warmup_ratio must be from 0 to 1, got 1.1"),
    ({"warmup_steps": 3, "warmup_ratio": 0.1}, "give warmup_steps or warmup_ratio, got both (3 and 0.1)"),
    ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
    ({"max_grad_norm": float("nan")}, "max_grad_norm must be at least 0, got nan"),
    ({"epochs": 0}, "epochs must be at least 1"),
    ({"epochs": None}, "epochs must be at least 1, got None"),
    ({"init": None}, "init must be one of default, gaussian, pissa, got None"),
    ({"steps": 0}, "steps must be at least 1"),
    ({"batch_size": 0}, "batch_size must be at least 1"),
    ({"accumulation": 0}, "accumulation must be at least 1"),
    ({"max_length": 1}, "max_length must be at least 2"),
    ({"label_smoothing": 1.0}, "label_smoothing must be at least 0 and below 1"),
    ({"chunk": -1}, "chunk must be at least 0, got -1"),
    ({"exclude_modules": "("}, "no regular expression"),
    ({"dtype": "float16"}, "dtype must be one of float32, bfloat16, float64, got 'float16'"),
    ({"weights": "auto"}, "weights must be one of decoded, packed, got 'auto'"),
    ({"eval_every": -1}, "eval_every must be at least 0"),
    ({"save_every": -1}, "save_every must be at least 0"),
    ({"keep": 0}, "keep must be at least 1"),
    ({"seed": -1}, "seed must be at least 0"),
    ({"seed": 1 << 63}, "seed must be at least 0 and below 9223372036854775808, got 9223372036854775808"),
]


@pytest.mark.parametrize(("given", "expected"), REFUSED)
def test_a_value_out_of_range_is_refused_by_name(given: dict[str, Any], expected: str):
    with pytest.raises(ValueError, match=r"^(settings|lora config): ") as error:
        settings(**given)
    assert expected in str(error.value)


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


def test_a_warm_up_that_nobody_asked_for_leaves_a_step_to_train_in():
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
