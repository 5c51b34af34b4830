"""Training data: from a file, or a folder of splits, to the batches of a step.

Input: rows of JSON, and an open model for its vocabulary and chat template. Output: examples of token ids and labels,
and the order in which training uses them. Modules in reading order:

    read      reads rows strictly, each with its file and line
    formats   parses a row: text, completion, chat, instruction, token ids
    encode    encodes a row to examples; the chat template defines where turns begin and end
    dataset   splits, notes, held-out rows, and the digest that identifies the data of a resumed run
    plan      packed rows, the order of training, and the arrays of a batch
"""

from llorch.training.batch import Examples
from llorch.training.data.dataset import TrainingData, read_data
from llorch.training.data.plan import PackedRows, TrainingOrder, batches
from llorch.training.settings import DataSettings, TrainOn

__all__ = ["DataSettings", "Examples", "PackedRows", "TrainOn", "TrainingData", "TrainingOrder", "batches", "read_data"]
