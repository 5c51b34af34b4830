"""How data becomes training examples."""

from dataclasses import dataclass
from typing import Literal, get_args

TrainOn = Literal["assistant", "last", "all"]


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
