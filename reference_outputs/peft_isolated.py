"""The float64 reference of isolated stages: what PEFT and torch make of a golden's inputs, one stage at a time.

PEFT and torch compute every part: PEFT's own layer on the golden's activations, autograd through each block of the
unmodified model, torch's cross entropy, clipping and AdamW. Only where a block begins and ends do hooks put the
golden's numbers.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from llorch.judging.expectations.training_places import (
    INPUT_OF,
    MERGED_AT,
    Arrays,
    at,
    before,
    borders,
    named,
    of_matrices,
    of_tensors,
    shared_input,
)
from llorch.judging.goldens.training import TrainingGolden
from llorch.judging.goldens.training_recipe import OPTIMIZER, RSLORA, STEPS_ALONE
from llorch.lora.adapter import Adapter
from llorch.stages.stage_ref import StageRef
from reference_outputs.peft_reference import (
    IN_TORCH,
    Peft,
    Watch,
    array_of,
    fed,
    gradient_of,
    gradients_of,
    logits_of,
    losses_of,
    optimizer_of,
    token_losses,
    tokens_of,
    trained,
    updated,
)


class Isolated:
    """Stages of one golden, each fed what the golden was fed."""

    def __init__(self, engine: Peft, golden: TrainingGolden) -> None:
        """Prepare for an engine that computes in float64 everywhere; nothing is computed yet."""
        self._engine, self._golden, self._batch = engine, golden, golden.batches[0]
        self._adapter, self._n_layers = golden.adapter_for(engine.config), engine.config.n_layers

    def arrays(self) -> Arrays:
        """Compute all isolated arrays."""
        rslora = self._golden.adapter_for(self._engine.config, RSLORA)
        found = dict(self._deltas(self._adapter, of_matrices("lora_delta", self._n_layers), "plain"))
        found |= self._deltas(rslora, shared_input("rslora"), "rslora")
        found |= losses_of(self._padded(at("adapted_logits")), self._batch)
        found |= self._block_gradients()
        for step in STEPS_ALONE:
            found |= self._step(step)
        merged = self._engine.merged(self._adapter, self._batch)
        return found | self._engine.schedules() | {MERGED_AT: merged[MERGED_AT]}

    def _golden_tensor(self, stage_ref: StageRef) -> Tensor:
        """Return a golden as float64 tensor."""
        return torch.from_numpy(self._golden.shown(stage_ref)).double()

    def _padded(self, stage_ref: StageRef) -> Tensor:
        """Place the golden's tokens as rows of the first batch; 0 where there is padding."""
        tokens, held = self._golden_tensor(stage_ref), torch.from_numpy(self._batch.documents >= 0)
        rows = tokens.new_zeros((*held.shape, tokens.shape[-1]))
        rows[held] = tokens
        return rows

    @torch.no_grad()
    def _deltas(
        self, adapter: Adapter, where: Mapping[str, StageRef], case: str
    ) -> Iterator[tuple[StageRef, np.ndarray]]:
        model, seen = self._engine.adapted(adapter), dict[StageRef, Tensor]()
        with Watch(model, adapter, seen, case=case):
            for name, stage_ref in where.items():
                kernel = model.base_model.model.get_submodule(adapter.targets[name].path)
                kernel(self._golden_tensor(at(INPUT_OF[stage_ref.part], stage_ref.layer)))
                yield stage_ref, array_of(seen[stage_ref])

    def _block_gradients(self) -> Arrays:
        """Run one pass in which every block gets the golden's input, and then the golden's gradient of its result."""
        model, ends, inputs = self._engine.adapted(self._adapter), borders(self._n_layers), dict[StageRef, Tensor]()
        with fed(model, inputs, {stage_ref: self._padded(stage_ref) for stage_ref in ends}) as made:
            loss = token_losses(logits_of(model, self._batch), self._batch, smoothing=0.0, reduction="mean")
        torch.autograd.backward([loss, *made], [None, *(self._padded(stage_ref) for stage_ref in [*ends.values()][1:])])
        found = {ends[stage_ref]: tokens_of(gradient_of(x), self._batch) for stage_ref, x in inputs.items()}
        return found | named(of_tensors("gradient", self._n_layers), gradients_of(model))

    def _step(self, step: int) -> Arrays:
        """Run one optimizer step from the golden's gradients and, after the first, from its parameters and moments."""
        model, start = self._engine.adapted(self._adapter), before(step, self._n_layers)
        optimizer = optimizer_of(model, OPTIMIZER)
        for name, parameter in trained(model).items():
            given = {stage: self._golden_tensor(where[name]) for stage, where in start.items()}
            parameter.grad = given.pop("gradient")
            if step > 1:
                parameter.data.copy_(given.pop("parameters"))
                moments = {IN_TORCH[stage]: tensor for stage, tensor in given.items()}
                optimizer.state[parameter] = {"step": torch.tensor(step - 1.0), **moments}
        return updated(model, optimizer, OPTIMIZER, step)
