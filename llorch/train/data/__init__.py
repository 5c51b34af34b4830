"""Training data: JSON lines to token ids and labels, rows of one or more examples, and the order of training."""

from llorch.train.batch import Examples
from llorch.train.data.dataset import TrainingData, read_data
from llorch.train.data.plan import Plan, Row, Rows, batches, make_batch
from llorch.train.settings import DataSettings, TrainOn

__all__ = [
    "DataSettings",
    "Examples",
    "Plan",
    "Row",
    "Rows",
    "TrainOn",
    "TrainingData",
    "batches",
    "make_batch",
    "read_data",
]
