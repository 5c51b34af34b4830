"""What PEFT and torch make of the inputs of a golden, one stage at a time: the truth of isolated stages, in float64.

Each part is theirs: PEFT's own leaf on the golden's activations, autograd through each block of the unmodified model,
torch's cross entropy, clipping and AdamW. Only where a block begins and ends do hooks put the golden's numbers.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llorch.lora.adapter import Adapter
from llorch.verify.training.goldens import TrainingGolden
from llorch.verify.training.recipe import (
    INPUT_OF,
    MERGED,
    OPTIMIZER,
    RSLORA,
    SHARED_INPUT,
    SMOOTHINGS,
    STATE,
    with_stage,
)
from llorch.verify.witnesses.peft import (
    Arrays,
    Peft,
    Watch,
    array_of,
    clip,
    gradients_of,
    logits_of,
    losses_of,
    optimizer_of,
    schedules,
    state_of,
    token_losses,
    tokens_of,
    trained,
)


class Isolated:
    """Stages of one golden, each fed what the golden was fed."""

    def __init__(self, producer: Peft, golden: TrainingGolden) -> None:
        """Prepare for a producer that computes in float64 everywhere; nothing is computed yet."""
        self._producer, self._golden, self._batch = producer, golden, golden.batches[0]
        self._adapter = golden.adapter_for(producer.config)

    def arrays(self) -> Arrays:
        """All of them, by the keys of the golden."""
        rslora = self._golden.adapter_for(self._producer.config, RSLORA)
        found = {f"plain/{key}": array for key, array in self._deltas(self._adapter, self._adapter.targets)}
        found |= {f"rslora/{key}": a for key, a in self._deltas(rslora, [f"layers.0.{n}" for n in SHARED_INPUT])}
        logits = self._padded("plain/adapted_logits")
        for case, smoothing in SMOOTHINGS.items():
            losses = losses_of(logits, self._batch, smoothing=smoothing)
            found |= {f"{case}/{key}": array for key, array in losses.items()}
        found |= {f"plain/{key}": array for key, array in self._block_gradients()}
        for step in (1, 2):
            found |= {f"step {step}/{key}": array for key, array in self._step(step).items()}
        merged = self._producer.merged(self._adapter, self._batch, [MERGED])
        key = with_stage(MERGED, "merged_weight")
        return found | schedules() | {f"plain/{key}": merged[key]}

    def _given(self, key: str) -> Tensor:
        return torch.from_numpy(self._golden.given(key)).double()

    def _padded(self, key: str) -> Tensor:
        """The golden's tokens as rows of the first batch; 0 where there is padding."""
        tokens, held = self._given(key), torch.from_numpy(self._batch.documents >= 0)
        rows = tokens.new_zeros((*held.shape, tokens.shape[-1]))
        rows[held] = tokens
        return rows

    @torch.no_grad()
    def _deltas(self, adapter: Adapter, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        model, seen = self._producer.adapted(adapter), {}
        with Watch(model, seen):
            for name in names:
                _, layer, short = name.split(".")
                leaf = model.base_model.model.get_submodule(adapter.targets[name].path)
                leaf(self._given(f"plain/l{layer}.{INPUT_OF[short]}"))
                key = with_stage(name, "lora_delta")
                yield key, array_of(seen[key])

    def _block_gradients(self) -> Iterator[tuple[str, np.ndarray]]:
        """One pass in which every block gets the golden's input, and then the golden's gradient of its result."""
        model = self._producer.adapted(self._adapter)
        given: dict[str, Tensor] = {}
        made: list[Tensor] = []
        decoder = model.base_model.model.model
        with ExitStack() as hooks:
            for i, layer in enumerate(decoder.layers):
                hooks.enter_context(layer.register_forward_pre_hook(self._feed(given, f"l{i}.block_in")))
                hooks.enter_context(layer.register_forward_hook(lambda _module, _inputs, out: made.append(out)))
            hooks.enter_context(decoder.norm.register_forward_pre_hook(self._feed(given, "last_block_out")))
            loss = token_losses(logits_of(model, self._batch), self._batch, smoothing=0.0, reduction="mean")
        above = [*(f"l{i}.gradient.block_in" for i in range(1, len(made))), "gradient.last_block_out"]
        torch.autograd.backward([loss, *made], [None, *(self._padded(f"plain/{key}") for key in above)])
        for key, tensor in given.items():
            assert tensor.grad is not None
            yield with_stage(key, "gradient"), tokens_of(tensor.grad, self._batch)
        yield from ((with_stage(name, "gradient"), array_of(grad)) for name, grad in gradients_of(model).items())

    def _feed(self, given: dict[str, Tensor], key: str) -> Any:
        given[key] = self._padded(f"plain/{key}").requires_grad_()
        return lambda _module, inputs: (given[key], *inputs[1:])

    def _step(self, step: int) -> Arrays:
        """One optimizer step from the golden's gradients and, after the first, from its parameters and moments."""
        model = self._producer.adapted(self._adapter)
        optimizer = optimizer_of(model, OPTIMIZER)
        source, case = ("gradient", "plain") if step == 1 else ("given", f"step {step}")
        for name, parameter in trained(model).items():
            parameter.grad = self._given(f"{case}/{with_stage(name, source)}")
            if step > 1:
                before, m, v = (self._given(f"step {step - 1}/{with_stage(name, stage)}") for stage in STATE)
                parameter.data.copy_(before)
                optimizer.state[parameter] = {"step": torch.tensor(step - 1.0), "exp_avg": m, "exp_avg_sq": v}
        norm = clip(model, OPTIMIZER)
        optimizer.step()
        return {"grad_norm": array_of(norm)} | state_of(model, optimizer)
