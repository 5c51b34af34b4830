"""What a training run computes, and where: one flat record, as flags and config files have it."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from llorch.lora.config import ALL_LINEAR, LoraConfig
from llorch.train.schedules import SCHEDULES

TrainOn = Literal["assistant", "last", "all"]
INITS = ("default", "gaussian", "pissa")
DTYPES = ("float32", "bfloat16", "float64")
RESIDENCIES = ("decoded", "packed")
_WIDE = 4096  # hidden_size at which the default rate is the usual one for LoRA
_USUAL_RATE = 2e-4
_WARMUP_RATIO = 0.05
_SEEDS = 1 << 63  # that torch takes


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What does not follow from the data itself.

    Learned are, by `train_on`, every turn of the `assistant` with its end-of-turn token, or the completion of a prompt;
    only its `last` turn; or `all` tokens. Rows of plain text are learned whole, rows of token ids as their labels say.
    """

    max_length: int = 1024  # tokens of an example; longer ones lose their end. With packing also the length of a row
    packing: bool = False  # put several examples into one row
    train_on: TrainOn = "assistant"
    parse_special: bool = False  # outside of messages the text of a control token, such as `<|im_end|>`, is that token
    valid: float = 0.0  # share of the rows held out for validation, where there is no valid.jsonl

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if self.max_length < 2:
            raise ValueError(f"max_length: expected at least 2 tokens, one to predict the other, got {self.max_length}")
        if self.train_on not in get_args(TrainOn):
            raise ValueError(f"train_on: expected one of {', '.join(get_args(TrainOn))}, got {self.train_on!r}")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """One training run; ValueError where a value is out of its range, or two exclude each other."""

    model: str  # .gguf file, Hugging Face folder or built-in name
    data: str  # JSONL file, .json list, folder with train.jsonl, or the name of a built-in example
    valid: float = 0.0  # share of the rows held out for validation without valid.jsonl; 0 <= valid < 1
    r: int = 16  # rank of the adapter; at least 1
    alpha: float = 32.0  # numerator of the adapter's scale; above 0
    target_modules: tuple[str, ...] | str = ALL_LINEAR  # ends of module paths, a regular expression, or all-linear
    exclude_modules: tuple[str, ...] | str = ()  # likewise, of what is left out again
    layers_to_transform: tuple[int, ...] | None = None  # numbers of the layers that get matrices; None: all
    rank_pattern: Mapping[str, int] = field(default_factory=dict)  # end of a module path, maybe a pattern -> own rank
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)  # likewise for alpha
    dropout: float = 0.0  # share of the adapter's input; 0 <= dropout < 1
    rslora: bool = False  # scale by alpha / sqrt(r) instead of alpha / r
    dora: bool = False  # learn the length of every row apart from its direction
    init: str = "default"  # first values of the adapter: one of INITS
    lr: float | None = None  # peak learning rate, above 0; None: by the width of the model, see `rate_for`
    lora_plus_ratio: float = 1.0  # learning rate of lora_B over that of lora_A; above 0, 1 is plain LoRA
    schedule: str = "cosine"  # of the learning rate: one of SCHEDULES
    warmup_steps: int | None = None  # optimizer steps of linear warm-up, at least 0; None: warmup_ratio decides
    warmup_ratio: float | None = None  # share of all steps, 0 <= ratio <= 1; None: 0.05 where warmup_steps is None too
    weight_decay: float = 0.0  # per step, times the learning rate; at least 0
    max_grad_norm: float = 1.0  # gradients are scaled down to this global norm; 0 leaves them as they are
    eight_bit: bool = False  # keep Adam's moments in blocks of 8 bits
    epochs: int = 3  # passes over the training set; at least 1
    steps: int | None = None  # optimizer steps, at least 1; None: as many as epochs make
    batch_size: int = 4  # rows of one forward pass; at least 1
    accumulation: int = 1  # forward passes of one optimizer step; at least 1
    max_length: int | None = None  # tokens of a row, at least 2; None: the model's context, at most 1024
    train_on: TrainOn = "assistant"  # which turns are learned; see DataSettings
    parse_special: bool = False  # text of a control token in plain text is that token
    packing: bool = False  # put several documents into a row; they do not see each other
    label_smoothing: float = 0.0  # 0 <= label_smoothing < 1
    chunk: int = 256  # tokens whose logits exist at the same time, at least 0; 0: those of a forward pass
    gradient_checkpointing: bool = False  # keep block inputs only and compute the rest twice; the bits are the same
    dtype: str | None = None  # of weights and activations: one of DTYPES; None: float32 on the CPU, bfloat16 on CUDA
    device: str = "cpu"  # cpu, cuda or cuda:N
    weights: str = "decoded"  # one of RESIDENCIES: packed keeps quantised matrices as they are in the file
    eval_every: int = 50  # optimizer steps between validations, besides the first and the last; 0: those two only
    save_every: int = 50  # optimizer steps between snapshots, besides the last; 0: the last only
    keep: int = 2  # snapshots that are kept; at least 1
    seed: int = 0  # of the adapter's first values, of dropout and of the order of the data; at least 0
    tensorboard: bool = False  # write events for TensorBoard, too

    def __post_init__(self) -> None:
        """Refuse values without a meaning."""
        for name, holds, expected in self._rules():
            if not holds:
                raise ValueError(f"settings: {name} must be {expected}, got {getattr(self, name)!r}")
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError(
                f"settings: give warmup_steps or warmup_ratio, got both ({self.warmup_steps} and {self.warmup_ratio})"
            )
        _ = self.lora  # which refuses what has no meaning there

    def _rules(self) -> tuple[tuple[str, bool, str], ...]:
        return (
            *self._number_rules(),
            ("schedule", self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}"),
            ("train_on", self.train_on in get_args(TrainOn), f"one of {', '.join(get_args(TrainOn))}"),
            ("init", self.init in INITS, f"one of {', '.join(INITS)}"),
            ("dtype", self.dtype is None or self.dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
            ("weights", self.weights in RESIDENCIES, f"one of {', '.join(RESIDENCIES)}"),
        )

    def _number_rules(self) -> tuple[tuple[str, bool, str], ...]:
        at_least = [("r", 1), ("epochs", 1), ("batch_size", 1), ("accumulation", 1), ("keep", 1)]
        at_least += [("eval_every", 0), ("save_every", 0), ("chunk", 0), ("weight_decay", 0), ("max_grad_norm", 0)]
        at_least += [("warmup_steps", 0), ("steps", 1), ("max_length", 2)]
        return (
            *((name, _between(getattr(self, name), low, math.inf), f"at least {low}") for name, low in at_least),
            ("lr", self.lr is None or 0 < self.lr < math.inf, "finite and above 0"),
            ("lora_plus_ratio", 0 < self.lora_plus_ratio < math.inf, "finite and above 0"),
            ("valid", _between(self.valid, 0, 1), "at least 0 and below 1"),
            ("dropout", _between(self.dropout, 0, 1), "at least 0 and below 1"),
            ("label_smoothing", _between(self.label_smoothing, 0, 1), "at least 0 and below 1"),
            ("seed", 0 <= self.seed < _SEEDS, f"at least 0 and below {_SEEDS}"),
            ("warmup_ratio", self.warmup_ratio == 1 or _between(self.warmup_ratio, 0, 1), "from 0 to 1"),
        )

    @property
    def lora(self) -> LoraConfig:
        """How the adapter is made."""
        return LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,
            target_modules=self.target_modules,
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
        """How the data is read; the length is known by now."""
        assert self.max_length is not None
        return DataSettings(
            max_length=self.max_length,
            packing=self.packing,
            train_on=self.train_on,
            parse_special=self.parse_special,
            valid=self.valid,
        )

    @property
    def dtype_name(self) -> str:
        """The dtype that the device gets when none is asked for."""
        return self.dtype or ("float32" if self.device == "cpu" else "bfloat16")

    def rate_for(self, hidden_size: int) -> float:
        """The peak learning rate: as asked for, or 2e-4 at a width of 4096 and in inverse proportion to the width."""
        return self.lr if self.lr is not None else _USUAL_RATE * _WIDE / hidden_size

    def warmup_for(self, total_steps: int) -> int:
        """Optimizer steps of warm-up in a run of so many."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        if self.warmup_ratio is not None:
            return math.ceil(self.warmup_ratio * total_steps)
        return min(math.ceil(_WARMUP_RATIO * total_steps), total_steps - 1)  # its first step has the rate 0

    def as_json(self) -> dict[str, Any]:
        """Every field, for `run.json`; `settings_from` reads it back."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def with_defaults(self, *, hidden_size: int, context: int) -> "TrainSettings":
        """Put a rate, a dtype and a length, which depend on model and device, in the place of defaults."""
        length = self.max_length if self.max_length is not None else min(context, 1024)
        return replace(self, lr=self.rate_for(hidden_size), dtype=self.dtype_name, max_length=length)


def _between(value: float | int | None, low: int, high: float | int) -> bool:
    """Whether a number, if there is one, is at least `low` and below `high`; NaN is not."""
    return value is None or low <= value < high
