"""Mistakes of checkpoint 13: blocks taken apart wrongly, activations rounded wrongly, and products with either."""

from llorch.verify.mistakes.mistake import Mistake
from llorch.verify.mistakes.quantised_blocks import BLOCKS
from llorch.verify.mistakes.quantised_inputs import RIGHT, QuantisedInputs
from llorch.verify.mistakes.quantised_rounding import ROUNDINGS

__all__ = ["QUANTISED", "RIGHT", "QuantisedInputs"]

QUANTISED: tuple[Mistake[QuantisedInputs], ...] = (*BLOCKS, *ROUNDINGS)
