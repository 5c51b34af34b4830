"""The float64 reference of isolated stages: results of PEFT and torch on a golden's inputs, one stage at a time.

PEFT and torch compute every part: PEFT's own layer on the golden's activations, autograd through each block of the
unmodified model, torch's cross entropy, clipping and AdamW. Only where a block begins and ends do hooks put the
golden's numbers.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from llorch.judging.expectations.training_refs import (
    INPUT_OF,
    MERGED_REF,
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
    capture_blocks,
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
    """Isolated stages of one golden, each computed from the golden's own inputs."""

    def __init__(self, engine: Peft, golden: TrainingGolden) -> None:
        """Prepare for an engine that computes in float64 everywhere; nothing is computed yet."""
        self._engine, self._golden, self._batch = engine, golden, golden.batches[0]
        self._adapter, self._n_layers = golden.adapter_for(engine.config), engine.config.n_layers

    def arrays(self) -> Arrays:
        """Compute all isolated arrays."""
        rslora = self._golden.adapter_for(self._engine.config, RSLORA)
        arrays = dict(self._deltas(self._adapter, of_matrices("lora_delta", self._n_layers), "plain"))
        arrays |= self._deltas(rslora, shared_input("rslora"), "rslora")
        arrays |= losses_of(self._padded(at("adapted_logits")), self._batch)
        arrays |= self._block_gradients()
        for step in STEPS_ALONE:
            arrays |= self._step(step)
        merged = self._engine.merged(self._adapter, self._batch)
        return arrays | self._engine.schedules() | {MERGED_REF: merged[MERGED_REF]}

    def _golden_tensor(self, stage_ref: StageRef) -> Tensor:
        """Return a golden as float64 tensor."""
        return torch.from_numpy(self._golden.shown(stage_ref)).double()

    def _padded(self, stage_ref: StageRef) -> Tensor:
        """Place the golden's tokens as rows of the first batch; 0 where there is padding."""
        tokens, is_token = self._golden_tensor(stage_ref), torch.from_numpy(self._batch.documents >= 0)
        rows = tokens.new_zeros((*is_token.shape, tokens.shape[-1]))
        rows[is_token] = tokens
        return rows

    @torch.no_grad()
    def _deltas(
        self, adapter: Adapter, stage_refs: Mapping[str, StageRef], case: str
    ) -> Iterator[tuple[StageRef, np.ndarray]]:
        model, stage_tensors = self._engine.adapted(adapter), dict[StageRef, Tensor]()
        with Watch(model, adapter, stage_tensors, case=case):
            for name, stage_ref in stage_refs.items():
                kernel = model.base_model.model.get_submodule(adapter.targets[name].path)
                kernel(self._golden_tensor(at(INPUT_OF[stage_ref.part], stage_ref.layer)))
                yield stage_ref, array_of(stage_tensors[stage_ref])

    def _block_gradients(self) -> Arrays:
        """Run one pass in which every block gets the golden's input, and the golden's gradient of its output."""
        model, ends, inputs = self._engine.adapted(self._adapter), borders(self._n_layers), dict[StageRef, Tensor]()
        with capture_blocks(model, inputs, {stage_ref: self._padded(stage_ref) for stage_ref in ends}) as outs:
            loss = token_losses(logits_of(model, self._batch), self._batch, smoothing=0.0, reduction="mean")
        torch.autograd.backward([loss, *outs], [None, *(self._padded(stage_ref) for stage_ref in [*ends.values()][1:])])
        gradients = {ends[stage_ref]: tokens_of(gradient_of(x), self._batch) for stage_ref, x in inputs.items()}
        return gradients | named(of_tensors("gradient", self._n_layers), gradients_of(model))

    def _step(self, step: int) -> Arrays:
        """Run one optimizer step from the golden's gradients and, after the first, from its parameters and moments."""
        model, start = self._engine.adapted(self._adapter), before(step, self._n_layers)
        optimizer = optimizer_of(model, OPTIMIZER)
        for name, parameter in trained(model).items():
            tensors = {stage: self._golden_tensor(stage_refs[name]) for stage, stage_refs in start.items()}
            parameter.grad = tensors.pop("gradient")
            if step > 1:
                parameter.data.copy_(tensors.pop("parameters"))
                moments = {IN_TORCH[stage]: tensor for stage, tensor in tensors.items()}
                optimizer.state[parameter] = {"step": torch.tensor(step - 1.0), **moments}
        return updated(model, optimizer, OPTIMIZER, step)
