"""Training data: a file, or a folder of splits, to the batches of a step.

In come rows of JSON and an opened model, for its vocabulary and chat template. Out come examples, ids of which some
are learned, and a plan that says which of them a step takes. In the order to read:

    read      rows, strictly, each with its file and line
    formats   what a row says: text, completion, chat, instruction, token ids
    encode    a row to examples; the template alone says where a turn begins and ends
    dataset   all of it: splits, notes, held-out rows, and the digest by which a resumed run knows its data
    plan      rows of one or several examples, the order of training, and the arrays of a batch
"""

from llorch.training.batch import Examples
from llorch.training.data.dataset import TrainingData, read_data
from llorch.training.data.plan import PackedRows, TrainingOrder, batches
from llorch.training.settings import DataSettings, TrainOn

__all__ = ["DataSettings", "Examples", "PackedRows", "TrainOn", "TrainingData", "TrainingOrder", "batches", "read_data"]
