"""Settings of a training run: one flat record for command-line options and settings files.

Each field declares its default, its help text and its allowed values once. The options of `llorch lora train`, the
names in a settings file and the error messages are derived from it.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from llorch.files import Weights
from llorch.files.strict_json import read_settings
from llorch.files.tokenizer.chat import TemplateSettings
from llorch.lora.config import ALL_LINEAR, LoraConfig
from llorch.lora.initial import INITS
from llorch.runtime.errors import UserError
from llorch.training.adamw import SCHEDULES

TrainOn = Literal["assistant", "last", "all"]
DTYPES = ("float32", "bfloat16", "float64")
RESIDENCIES = ("decoded", "packed")
_WIDE = 4096  # hidden_size for which the default learning rate is `_USUAL_RATE`; smaller models get a higher rate
_USUAL_RATE = 2e-4
_WARMUP_RATIO = 0.05  # default share of warm-up steps
_MOST = 2**31 - 1  # largest integer setting, as on the command line
_SEEDS = 1 << 63  # number of seeds that torch accepts
_RANGES: Mapping[str, Callable[[Any], bool]] = {  # all are False for NaN
    "at least 0": lambda n: 0 <= n < math.inf,
    "at least 1": lambda n: 1 <= n < math.inf,
    "at least 2": lambda n: 2 <= n < math.inf,
    "at least 0 and below 1": lambda n: 0 <= n < 1,
    "from 0 to 1": lambda n: 0 <= n <= 1,
    "finite and above 0": lambda n: 0 < n < math.inf,
    f"at least 0 and below {_SEEDS}": lambda n: 0 <= n < _SEEDS,
}


def _setting(default: Any, text: str, allowed: str | Collection[str] = "") -> Any:
    """Make a field with its help text; `allowed`: a key of `_RANGES`, or texts; "": any. A default None is allowed."""
    metadata = {"text": text, "allowed": allowed}
    if default is dict:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Settings of the data.

    `train_on` sets the tokens in the loss: all turns of the `assistant` with their EOS (or the completion of a prompt),
    its `last` turn only, or `all` tokens. All tokens of plain text are in the loss; rows of token ids have labels.
    """

    max_length: int = 1024  # longer examples are cut to this number of tokens; with packing also the length of a row
    packing: bool = False  # put several examples into one row
    train_on: TrainOn = "assistant"
    parse_special: bool = False  # outside of messages, encode the text of a control token (`<|im_end|>`) as this token
    valid: float = 0.0  # share of the rows held out for validation if there is no valid.jsonl
    template_date: str | None = None  # YYYY-MM-DD, for chat templates that write today's date; None means today
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)  # variables of the chat template

    def __post_init__(self) -> None:
        """Refuse invalid values (UserError), also of the chat template's settings."""
        if self.max_length < 2:
            raise UserError(f"max_length: expected at least 2 tokens (one predicts the next), got {self.max_length}")
        if self.train_on not in get_args(TrainOn):
            raise UserError(f"train_on: expected one of {', '.join(get_args(TrainOn))}, got {self.train_on!r}")
        _ = self.template

    @property
    def template(self) -> TemplateSettings:
        """Settings of the chat template."""
        return _template_settings(self.template_date, self.chat_template_kwargs)


def _template_settings(day: str | None, variables: Mapping[str, object]) -> TemplateSettings:
    try:
        time = None if day is None else datetime.strptime(day, "%Y-%m-%d")
    except ValueError:
        raise UserError(f"template_date: expected a date such as 2026-11-25, got {day!r}") from None
    return TemplateSettings(variables, time)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of one training run; UserError if a value is out of range, or two exclude each other."""

    model: str  # .gguf file, Hugging Face folder or built-in name
    data: str  # JSONL file, .json list, folder with train.jsonl, or the name of a built-in example
    valid: float = _setting(0.0, "Share of rows held out for validation.", "at least 0 and below 1")
    r: int = _setting(16, "Rank of the adapter.", "at least 1")
    alpha: float = _setting(32.0, "Scale of the adapter: alpha / r.")
    target_modules: tuple[str, ...] | str = _setting(
        ALL_LINEAR, "Matrices to adapt: names, a regular expression or all-linear."
    )
    target_parameters: tuple[str, ...] = _setting((), "Parameters to adapt, by ends of their paths.")
    exclude_modules: tuple[str, ...] | str = _setting((), "Matrices not to adapt.")
    layers_to_transform: tuple[int, ...] | None = _setting(None, "Layers to adapt, such as 0,4-7.  [default: all]")
    rank_pattern: Mapping[str, int] = _setting(dict, "Rank where a path ends in NAME; repeatable.")
    alpha_pattern: Mapping[str, float] = _setting(dict, "Alpha where a path ends in NAME; repeatable.")
    dropout: float = _setting(0.0, "Share of inputs dropped.", "at least 0 and below 1")
    rslora: bool = _setting(False, "Scale alpha / sqrt(r) in place of alpha / r.")
    dora: bool = _setting(False, "Separate length and direction of rows.")
    init: str = _setting("default", "Initial values.", INITS)
    lr: float | None = _setting(None, "Peak learning rate.  [default: 2e-4 * 4096 / hidden_size]", "finite and above 0")
    lora_plus_ratio: float = _setting(1.0, "Rate of lora_B over lora_A.", "finite and above 0")
    schedule: str = _setting("cosine", "Schedule of the learning rate after warm-up.", SCHEDULES)
    warmup_steps: int | None = _setting(None, "Optimizer steps of linear warm-up.", "at least 0")
    warmup_ratio: float | None = _setting(None, "Warm-up's share of steps.  [default: 0.05]", "from 0 to 1")
    weight_decay: float = _setting(0.0, "Decoupled weight decay.", "at least 0")
    max_grad_norm: float = _setting(1.0, "Largest gradient norm; 0: any.", "at least 0")
    eight_bit: bool = _setting(False, "Adam's moments in blocks of 8 bits.")
    epochs: int = _setting(3, "Passes over the training set.", "at least 1")
    steps: int | None = _setting(None, "Optimizer steps, instead of --epochs.", "at least 1")
    batch_size: int = _setting(4, "Rows of one forward pass.", "at least 1")
    accumulation: int = _setting(1, "Forward passes per step.", "at least 1")
    max_length: int | None = _setting(
        None, "Longest row, in tokens.  [default: the model's context, at most 1024]", "at least 2"
    )
    train_on: str = _setting("assistant", "Tokens of a chat in the loss.", get_args(TrainOn))
    parse_special: bool = _setting(False, "Control tokens read from plain text.")
    template_date: str | None = _setting(None, "Date, as YYYY-MM-DD.  [default: today]")
    chat_template_kwargs: Mapping[str, object] = _setting(dict, "Variables, as in '{\"enable_thinking\": false}'.")
    packing: bool = _setting(False, "Several separate documents per row.")
    label_smoothing: float = _setting(0.0, "Share of the target for all tokens.", "at least 0 and below 1")
    chunk: int = _setting(256, "Tokens per block of logits; 0: all.", "at least 0")
    gradient_checkpointing: bool = _setting(False, "Less memory and more time; equal bits.")
    dtype: str | None = _setting(None, "Number type.  [default: float32 on the CPU, bfloat16 on CUDA]", DTYPES)
    device: str = _setting("cpu", "Device: cpu, cuda or cuda:N.")
    weights: str = _setting("decoded", "Form of quantised matrices.", RESIDENCIES)
    eval_every: int = _setting(50, "Steps between validations.", "at least 0")
    save_every: int = _setting(50, "Steps between snapshots.", "at least 0")
    keep: int = _setting(2, "Number of snapshots kept.", "at least 1")
    seed: int = _setting(0, "Seed of the run.", f"at least 0 and below {_SEEDS}")
    tensorboard: bool = _setting(False, "Event files for TensorBoard.")

    def __post_init__(self) -> None:
        """Refuse invalid values (UserError)."""
        for setting in fields(self):
            value = getattr(self, setting.name)
            allowed = setting.metadata.get("allowed")
            if isinstance(value, int) and value > _MOST and setting.name != "seed":
                raise UserError(f"settings: {setting.name} must be at most {_MOST}, got {value}")
            if not allowed or (value is None and setting.default is None):
                continue
            is_range = isinstance(allowed, str)
            if value is None or not (_RANGES[allowed](value) if is_range else value in allowed):
                expected = allowed if is_range else f"one of {', '.join(allowed)}"
                raise UserError(f"settings: {setting.name} must be {expected}, got {value!r}")
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            values_given = f"{self.warmup_steps} and {self.warmup_ratio}"
            raise UserError(f"settings: give warmup_steps or warmup_ratio, got both ({values_given})")
        _ = self.lora  # validates the adapter's settings
        _template_settings(self.template_date, self.chat_template_kwargs)

    @property
    def lora(self) -> LoraConfig:
        """Settings of the adapter."""
        return LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,
            target_modules=self.target_modules,
            target_parameters=self.target_parameters,
            exclude_modules=self.exclude_modules,
            layers_to_transform=self.layers_to_transform,
            rank_pattern=self.rank_pattern,
            alpha_pattern=self.alpha_pattern,
            lora_dropout=self.dropout,
            use_rslora=self.rslora,
            use_dora=self.dora,
        )

    @property
    def data_settings(self) -> DataSettings:
        """Settings of the data; `max_length` must be set."""
        assert self.max_length is not None
        return DataSettings(**{setting.name: getattr(self, setting.name) for setting in fields(DataSettings)})

    @property
    def dtype_name(self) -> str:
        """Dtype of the run: `dtype`, or the default of the device."""
        return self.dtype or ("float32" if self.device == "cpu" else "bfloat16")

    def rate_for(self, hidden_size: int) -> float:
        """Return the peak learning rate: `lr`, or 2e-4 * 4096 / hidden_size."""
        return self.lr if self.lr is not None else _USUAL_RATE * _WIDE / hidden_size

    def warmup_for(self, total_steps: int) -> int:
        """Count the warm-up steps of a run of `total_steps` optimizer steps."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        if self.warmup_ratio is not None:
            return math.ceil(self.warmup_ratio * total_steps)
        return min(math.ceil(_WARMUP_RATIO * total_steps), total_steps - 1)  # a run of one step would have rate 0

    def as_json(self) -> dict[str, Any]:
        """Return all fields for `run.json`; `settings_from` reads them back."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def with_defaults(self, *, hidden_size: int, context: int) -> "TrainSettings":
        """Set defaults that depend on model, device and day: learning rate, dtype, length and date."""
        length = self.max_length if self.max_length is not None else min(context, 1024)
        day = self.template_date or date.today().isoformat()
        rate = self.rate_for(hidden_size)
        return replace(self, lr=rate, dtype=self.dtype_name, max_length=length, template_date=day)


_DROPOUT = "attention_dropout"  # the only dropout setting of transformers' text models in llorch's families


def text_settings(weights: Weights) -> dict[str, Any]:
    """Return the base's config.json, or its text section for a multimodal model; {} for a GGUF file."""
    settings = read_settings(Path(weights.path) / "config.json")
    text_config = settings.get("text_config")
    return text_config if isinstance(text_config, dict) else settings


def describe_base_dropout(weights: Weights) -> str:
    """Describe the dropout in config.json that llorch does not apply in training; empty if there is none."""
    share = text_settings(weights).get(_DROPOUT)
    if not share:
        return ""
    return f"config.json has {_DROPOUT} {share}: transformers and PEFT train with this dropout, llorch trains without"
