"""Advice for a wrong quantity without a cause: arrays and settings that a training dump needs to narrow it down."""

from collections.abc import Sequence
from dataclasses import fields

from llorch.diagnosis.training.judge import TrainingJudge
from llorch.diagnosis.training.replay import FLOW
from llorch.diagnosis.training.start import first_step
from llorch.diagnosis.verdict import StageCheck
from llorch.engines.dumps.training_dump import Settings
from llorch.judging.expectations.training_refs import ISOLATED

PASSES = FLOW[:4]  # groups of the forward and backward passes: logits, token losses, loss, gradients
_INPUTS = {"adapted_logits": "logits", "token_losses": "token_losses"}  # group -> name in a dump
_GRADIENTS = {"gradient": "the gradients (grad.*)"}


def advise(wrong: StageCheck, judge: TrainingJudge, *, from_adapter: bool) -> str:
    """Say if a gradient is 0, and what the dump lacks if the error is in one number, or may come `from_adapter`."""
    step, sentences = judge.steps[wrong.n_pass], list[str]()
    is_isolated = wrong.isolated.mode == ISOLATED
    if wrong.stage == "gradient" and not judge.dumped_array(wrong).array.any():
        sentences.append("This gradient is exactly 0.")
    if judge.dumped_array(wrong).array.size == 1:
        candidates = _GRADIENTS if is_isolated else _INPUTS | _GRADIENTS
        missing = [name for group, name in candidates.items() if group not in {key[0] for key in step.shown}]
        missing += ["a second step"] if len(judge.steps) == 1 else []
        undeclared = [field.name for field in fields(Settings) if field.name not in judge.dump.declared]
        if step.number == first_step(judge.dump).number:  # settings of the optimizer have no effect yet
            undeclared = [name for name in undeclared if name == "label_smoothing"]
        if missing:
            sentences.append(f"A setting fitted to one number is no cause: add {_join(missing)} to the dump.")
        if undeclared and not is_isolated:
            sentences.append(f"The dump does not declare {_join(undeclared)}.")
    if from_adapter and wrong.stage in PASSES and not is_isolated:
        names = f"step{step.number - 1}.param.*"
        sentences.append(f"If --adapter may be of another step, add the tensors before this step ({names}).")
    return "".join(f" {sentence}" for sentence in sentences)


def _join(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
