"""Known mistakes of training that a dump could not have shown: each is injected and leaves the arrays unchanged."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from llorch.diagnosis.mistakes import TRAINING, Mistake
from llorch.diagnosis.mistakes.variants import VISIBLE
from llorch.diagnosis.training.hypotheses import OUTSIDE, RANDOM, group_of, possible
from llorch.diagnosis.training.judge import TrainingJudge
from llorch.diagnosis.training.replay import FLOW, InjectedMistake, Key, TrainingReplay
from llorch.engines.dumps.training_dump import TrainingDump
from llorch.families.config import ModelConfig
from llorch.lora.adapter import LORA_B, Adapter
from llorch.training.batch import IGNORED

MOST_WORK = 1e9  # numbers of the base times tokens of the dump, from which on nothing is planted to see


def could_not_show(
    replay: TrainingReplay, judge: TrainingJudge, adapter: Adapter, config: ModelConfig
) -> tuple[dict[str, list[str]], list[str]]:
    """List mistakes that the dump cannot show, by reason, with a note if this was not tried."""
    dump, hidden = replay.dump, dict[str, list[str]]()
    for mistake in TRAINING:
        if mistake.stages[0] in OUTSIDE:
            hidden.setdefault(OUTSIDE[mistake.stages[0]], []).append(mistake.name)
        elif mistake.name in RANDOM:
            hidden.setdefault("llorch cannot repeat the random numbers of dropout", []).append(mistake.name)
        elif not mistake.applies_to(config):
            hidden.setdefault("this model does not have the part that it changes", []).append(mistake.name)
    n_tokens = sum(int((batch.positions >= 0).sum()) for step in dump.steps for batch in step.batches)
    n_weights = config.n_layers * config.hidden_size * (4 * config.hidden_size + 3 * config.intermediate_size)
    if n_tokens * n_weights > MOST_WORK:
        return hidden, ["the model is large: llorch did not test which other mistakes this dump cannot show"]
    base, reasons = replay.run(), _parts_by_reason(dump, adapter)
    rows, first = judge.rows(base), min(step.number for step in dump.steps if step.batches)

    def shows(mistake: Mistake[Any], until: Key | None) -> bool:
        made = replay.run((InjectedMistake(mistake, along=True),), until=until).arrays
        seen = [row for row in rows if row.key in made]
        return any(judge.apart(row, made[row.key], base.arrays[row.key]) >= VISIBLE for row in seen)

    for mistake in possible(config):
        if not (shows(mistake, (first, "loss", "")) or shows(mistake, None)):  # most show in the first step
            hidden.setdefault(_reason_not_shown(mistake, dump, reasons), []).append(mistake.name)
    return hidden, []


def _reason_not_shown(mistake: Mistake[Any], dump: TrainingDump, reasons: Mapping[str, Sequence[str]]) -> str:
    group = group_of(mistake)
    shown = {of for step in dump.steps for of, _ in step.shown}
    if not shown & {*FLOW[FLOW.index(group) :]}:
        return f"the dump has no quantity from {group} on"
    told = (reason for reason, parts in reasons.items() if any(part in mistake.name for part in parts))
    return next(told, "its effect here is no larger than rounding")


def _parts_by_reason(dump: TrainingDump, adapter: Adapter) -> dict[str, Sequence[str]]:
    """Map each reason why a dump cannot show something to parts of the names of the mistakes."""
    settings, config = dump.settings, adapter.config
    batches = [batch for step in dump.steps for batch in step.batches]
    slots = [step.batches for step in dump.steps if step.batches]
    held: dict[str, tuple[bool, Sequence[str]]] = {
        "B is zero, so the adapter adds zero and A has no gradient": (
            not any(array.any() for name, array in adapter.flat().items() if name.endswith(LORA_B)), ("lora",)),
        "rank_pattern is empty": (not config.rank_pattern, ("rank-pattern",)),
        "alpha_pattern is empty": (not config.alpha_pattern, ("alpha-pattern",)),
        "the adapter is not rank-stabilised": (not config.use_rslora, ("rslora",)),
        "a step has one micro-batch": (max(map(len, slots)) < 2, ("accumulation",)),
        "a step has one row": (max(sum(len(batch.ids) for batch in own) for own in slots) < 2, ("mean-of-rows",)),
        "labels are not smoothed": (settings.label_smoothing == 0, ("smoothing",)),
        "every token is learned": (
            all((batch.labels[batch.positions > 0] != IGNORED).all() for batch in batches),
            ("prompt", "ignored", "all-tokens")),
        "gradients are not clipped": (settings.max_grad_norm == math.inf, ("clip",)),
        "weight decay is 0": (settings.weight_decay == 0, ("decay",)),
        "the dump has only the first step": (dump.steps[-1].number == 1, ("step-counted",)),
    }  # fmt: skip
    return {reason: parts for reason, (holds, parts) in held.items() if holds}
