"""Mistakes of beginners: wrong functions by name of the exercise. The docstring tells the learner what is wrong.

Engines make the mistakes of `llorch.diagnosis.mistakes`; these are rather those of people who write a function for the
first time.
"""

from collections.abc import Mapping, Sequence

from llorch.apps.learn.beginners import after_logits, files, forward, training
from llorch.apps.learn.exercise import Call

BEGINNERS: Mapping[str, Sequence[Call]] = {**forward.WRONG, **after_logits.WRONG, **files.WRONG, **training.WRONG}
