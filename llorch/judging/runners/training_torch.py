"""Checkpoints 15 to 20, but for files, on the torch path: the modules, kernels, loss and optimizer that training uses.

The trainer's own `Stepper` makes gradients and steps. Isolated, hooks put in the golden's numbers where a block begins,
and its gradient where one ends. In half precision the base and its activations are half, the adapter, its gradients
and the optimizer float32. `-trainer` is how `llorch lora train` runs when it saves memory: fused attention, products of
frozen weights by oneDNN, blocks that run again for their gradients, logits that never exist all at once. On a mesh
every rank runs so, and all of them show the whole of each array.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llorch.files import Weights
from llorch.judging.expectations.training import comparisons, make_expectations, stored, with_load_paths
from llorch.judging.expectations.training_places import (
    CHAINED,
    INPUT_OF,
    ISOLATED,
    after,
    at,
    before,
    borders,
    of_matrices,
    of_tensors,
    shared_input,
)
from llorch.judging.goldens.training import HALF_DTYPES, TrainingGolden
from llorch.judging.goldens.training_recipe import (
    CURVE,
    OPTIMIZER,
    RSLORA,
    SMOOTHING,
    SMOOTHINGS,
    STEPS_ALONE,
    STEPS_SHOWN,
    OptimizerRecipe,
    step_batches,
    with_zero_b,
)
from llorch.judging.runners.training_numpy import Results
from llorch.judging.tolerances.training import NUMPY_ALONE
from llorch.judging.types import Comparison
from llorch.lora.adapter import Adapter
from llorch.lora.merge import MergedWeights
from llorch.ops.numerics import DtypeName
from llorch.pytorch.causal_lm import CausalLM, widened
from llorch.pytorch.device import Target
from llorch.pytorch.distributed.dtensor import like, own, part_of, whole_together
from llorch.pytorch.distributed.launch import gathered, named_on, summed
from llorch.pytorch.distributed.sharding_plan import COLUMNS, ROWS, cut_for
from llorch.pytorch.load import Cut, all_of, load_dense
from llorch.pytorch.lora.adapters import attach, lora_modules, trainable_parameters
from llorch.pytorch.lora.modules import LoraModule
from llorch.pytorch.train.adamw import AdamW
from llorch.pytorch.train.forward import checkpoint_gradients, hidden_states
from llorch.pytorch.train.loading import load_for_training
from llorch.pytorch.train.loss import loss_sum
from llorch.pytorch.train.step import Alone, OnMesh, Stepper
from llorch.runtime.errors import UserError
from llorch.stages.stage_ref import StageRef
from llorch.training.batch import IGNORED

VARIANTS = {"": False, "-trainer": True}  # suffix of the backend's name -> whether it runs as the trainer does
DTYPES = ("float32", "float64", *HALF_DTYPES)  # in which training is judged
NAME = "default"  # of the adapter
CHUNK = 3  # rows of logits at once, fewer than any batch has
MOMENTS = {"first_moment": "m", "second_moment": "v"}  # stage -> in the state of the optimizer


def verify_training_torch(name: str, target: Target, mesh: DeviceMesh | None = None) -> Iterator[Comparison]:
    """Judge the torch path in each of `VARIANTS` and one of `DTYPES` on one of `MODELS` against its stored goldens.

    On a mesh it is judged as all ranks have it together, as training runs; all of them have to ask.
    """
    if target.dtype_name not in DTYPES:
        raise UserError(f"training: expected one of {', '.join(DTYPES)}, got {target}")
    if mesh is None:
        yield from torch_rows(name, *stored(name), target)
    else:
        yield from mesh_rows(name, *stored(name), target, mesh)


def torch_rows(name: str, weights: Weights, golden: TrainingGolden, target: Target) -> Iterator[Comparison]:
    """Compare training runs in torch with goldens that are at hand, for each variant."""
    for suffix, as_trainer in VARIANTS.items():
        runner = TorchTrainingRunner(weights, golden, target, as_trainer=as_trainer)
        yield from _judge_runner(name, runner, f"{target}{suffix}")


def mesh_rows(
    name: str, weights: Weights, golden: TrainingGolden, target: Target, mesh: DeviceMesh
) -> Iterator[Comparison]:
    """Compare a training run that the ranks of a mesh make together; all ranks have to call this function."""
    runner = TorchTrainingRunner(weights, golden, target, as_trainer=True, mesh=mesh)
    yield from _judge_runner(name, runner, named_on(target, mesh))


def _judge_runner(name: str, runner: "TorchTrainingRunner", backend: str) -> Iterator[Comparison]:
    """Compare the isolated and chained runs of a torch runner with the goldens of training."""
    dtype: DtypeName = runner.target.dtype_name  # pyright: ignore[reportAssignmentType]
    ours = {ISOLATED: dict(runner.isolated()), CHAINED: dict(runner.chained())}
    expectations = make_expectations(runner.golden, runner.weights.config, dtype)
    yield from with_load_paths(comparisons(name, expectations, ours, backend, left_out=NUMPY_ALONE), runner.golden)


class TorchTrainingRunner:
    """What torch makes of one golden on one device, in one dtype, as it is written or as the trainer saves memory."""

    def __init__(
        self,
        weights: Weights,
        golden: TrainingGolden,
        target: Target,
        *,
        as_trainer: bool,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Prepare; nothing is loaded yet."""
        self.weights = weights.astype(np.float64) if target.dtype == torch.float64 else weights
        self.target, self.n_layers = target, weights.config.n_layers
        self.as_trainer, self.chunk = as_trainer, CHUNK if as_trainer else None
        self.batches = golden.batches
        self.adapter = golden.adapter_for(weights.config)
        self.rslora = golden.adapter_for(weights.config, RSLORA)
        self.golden, self._mesh = golden, mesh

    def isolated(self) -> Results:
        """Yield every stage that can be fed the golden's inputs."""
        yield from self._deltas(self.adapter, of_matrices("lora_delta", self.n_layers))
        yield from self._deltas(self.rslora, shared_input("rslora"))
        yield from self._losses(self._padded(at("adapted_logits")), nn.Identity())
        yield from self._gradients(self.adapter, fed=True)
        for step in STEPS_ALONE:
            yield from self._optimizer_step(step)

    def chained(self) -> Results:
        """Yield the results of every run from its beginning."""
        yield from self._forward()
        worker = self._worker(self.rslora)
        yield at("adapted_logits", case="rslora"), self._tokens(self._logits(worker))
        yield from self._gradients(self.adapter)
        stepper = self._stepper(with_zero_b(self.adapter), OPTIMIZER, 0.0)
        stepper.backward(self.batches[:1])
        yield from self._gradients_by_place(stepper, "zero_b")
        yield from self._steps()
        yield from self._curve()
        yield at("merged_logits"), self._merged_logits()

    def _worker(self, adapter: Adapter) -> Alone:
        if self.as_trainer:
            width = max(batch.ids.shape[1] for batch in self.batches)
            module = load_for_training(
                self.weights, self.target, residency="decoded", batch=2, n_tokens=width, mesh=self._mesh
            )
        else:
            module = load_dense(self.weights, dtype=self.target.dtype, device=self.target.device)
        attach(module, adapter, name=NAME, trainable=True)
        if self.as_trainer:
            checkpoint_gradients(module)
        return self._working(module.train())

    @property
    def _cut(self) -> Cut:
        return all_of if self._mesh is None else cut_for(self.weights.config, self._mesh)

    def _working(self, module: CausalLM) -> Alone:
        return Alone(module) if self._mesh is None else OnMesh(module, self._mesh)

    def _hidden(self, worker: Alone) -> Tensor:
        """Compute the hidden states of all rows; each rank computes its own rows."""
        rows, _ = worker.rows_of(self.batches[0])
        own = worker.run(lambda module: hidden_states(module, rows, self.target.device))
        return all_rows(worker, own.detach(), len(self.batches[0].ids))

    def _logits(self, worker: Alone) -> Tensor:
        hidden = self._hidden(worker)
        return worker.run(lambda module: module.lm_head(hidden))

    def _golden_tensor(self, stage_ref: StageRef, dtype: torch.dtype | None = None) -> Tensor:
        """Return a golden as tensor on the device of the run."""
        return torch.tensor(self.golden.shown(stage_ref), device=self.target.device, dtype=dtype or self.target.dtype)

    def _padded(self, stage_ref: StageRef) -> Tensor:
        """Place the golden's tokens as rows of the first batch; 0 where there is padding."""
        tokens = self._golden_tensor(stage_ref)
        held = torch.from_numpy(self.batches[0].documents >= 0)
        rows = tokens.new_zeros((*held.shape, tokens.shape[-1]))
        rows[held.to(rows.device)] = tokens
        return rows

    def _tokens(self, rows: Tensor) -> np.ndarray:
        """Return the rows of all tokens but padding as an array of at least float32."""
        return widened(rows.detach()).cpu().numpy()[self.batches[0].documents >= 0]

    def _deltas(self, adapter: Adapter, where: Mapping[str, StageRef]) -> Results:
        """Compute the adapter's deltas: each kernel of the forward pass is also given the golden's input."""
        worker, deltas = self._worker(adapter), dict[str, Tensor]()

        def note(lora_module: LoraModule, name: str, _: Tensor) -> None:
            if name in where:
                given = self._golden_tensor(at(INPUT_OF[where[name].part], where[name].layer))
                deltas[name] = whole_output(worker, name, _delta(lora_module, own_input(worker, name, given)))

        _at_each_module(worker.module, note)
        self._hidden(worker)
        for name, stage_ref in where.items():
            yield stage_ref, array_of(deltas[name])

    def _forward(self) -> Results:
        """Compute the deltas on llorch's activations, the logits, and the losses of llorch's hidden states."""
        worker, deltas = self._worker(self.adapter), dict[str, Tensor]()

        def note(lora_module: LoraModule, name: str, x: Tensor) -> None:
            deltas[name] = whole_output(worker, name, _delta(lora_module, x))

        _at_each_module(worker.module, note)
        hidden = self._hidden(worker)
        for name, stage_ref in of_matrices("lora_delta", self.n_layers).items():
            yield stage_ref, self._tokens(all_rows(worker, deltas[name], len(hidden)))
        yield at("adapted_logits"), self._tokens(worker.run(lambda module: module.lm_head(hidden)))
        yield from worker.run(lambda module: list(self._losses(hidden, module.lm_head)))

    def _losses(self, hidden: Tensor, lm_head: nn.Module) -> Results:
        batch = self.batches[0]
        for case, smoothing in SMOOTHINGS.items():
            losses = [self._loss(hidden, lm_head, labels, smoothing) for labels in _one_by_one(batch.labels)]
            yield at("token_losses", case=case), array_of(torch.stack(losses))
            mean = self._loss(hidden, lm_head, batch.labels, smoothing) / batch.n_trained
            yield at("loss", case=case), array_of(mean)

    def _loss(self, hidden: Tensor, lm_head: nn.Module, labels: np.ndarray, smoothing: float) -> Tensor:
        return loss_sum(hidden, lm_head, torch.from_numpy(labels), label_smoothing=smoothing, chunk=self.chunk)

    def _gradients(self, adapter: Adapter, *, fed: bool = False) -> Results:
        """Yield the gradients of every trained tensor and of block inputs, in one backward pass.

        If `fed`, each block is alone: the input, and the gradient of the output, are the golden's.
        """
        stepper, inputs = self._stepper(adapter, OPTIMIZER, 0.0), dict[StageRef, Tensor]()
        worker, n_rows = stepper.worker, len(self.batches[0].ids)
        _, counts = worker.rows_of(self.batches[0])
        model, ends = worker.module.model, borders(self.n_layers)
        for module, (x, d_x) in zip((*model.layers, model.norm), ends.items(), strict=True):
            given = (worker.own_rows(self._padded(x)), counts * worker.own_rows(self._padded(d_x))) if fed else None
            module.register_forward_pre_hook(_noting(inputs, d_x, given))
        stepper.backward(self.batches[:1])
        yield from self._gradients_by_place(stepper, "plain")
        for stage_ref, tensor in inputs.items():
            yield stage_ref, self._tokens(all_rows(worker, _gradient_of(tensor), n_rows))

    def _gradients_by_place(self, stepper: Stepper, case: str) -> Results:
        """Yield the gradient of every trained tensor, with its place."""
        stage_refs = of_tensors("gradient", self.n_layers, case)
        grads = whole_together({name: _gradient_of(stepper.optimizer.params[name]) for name in stage_refs})
        for name, stage_ref in stage_refs.items():
            yield stage_ref, array_of(grads[name])

    def _stepper(self, adapter: Adapter, recipe: OptimizerRecipe, smoothing: float) -> Stepper:
        """Build the stepper with which the trainer makes its steps."""
        worker = self._worker(adapter)
        optimizer = AdamW(
            trainable_parameters(worker.module, NAME), betas=recipe.betas, eps=recipe.eps,
            weight_decay=recipe.weight_decay, lr_ratio=1.0, eight_bit=False,
        )  # fmt: skip
        return Stepper(
            worker, optimizer, self.target.device, label_smoothing=smoothing, chunk=self.chunk, max_norm=recipe.max_norm
        )

    def _optimizer_step(self, step: int) -> Results:
        """Run one optimizer step from the golden's gradients, moments and parameters."""
        optimizer, start = self._stepper(self.adapter, OPTIMIZER, 0.0).optimizer, before(step, self.n_layers)
        state: dict[str, Tensor] = {"step": torch.tensor(step - 1)}
        for name, parameter in optimizer.params.items():
            given = {stage: self._golden_tensor(where[name], parameter.dtype) for stage, where in start.items()}
            parameter.grad = like(parameter.data, part_of(given["gradient"], parameter.data).clone())
            if step > 1:
                own(parameter.data).copy_(part_of(given["parameters"], parameter.data))
                state |= {f"{name}.{kind}": given[stage] for stage, kind in MOMENTS.items()}
        if step > 1:
            optimizer.load(state)
        norm = optimizer.clip(OPTIMIZER.max_norm)
        optimizer.step(OPTIMIZER.learning_rate)
        yield from self._results_of_step(optimizer, step, norm)

    def _steps(self) -> Results:
        stepper = self._stepper(self.adapter, OPTIMIZER, 0.0)
        for step in range(1, max(STEPS_SHOWN) + 1):
            _, norm = stepper.step(step_batches(self.batches, step, 1), OPTIMIZER.learning_rate)
            if step in STEPS_SHOWN:
                yield from self._results_of_step(stepper.optimizer, step, norm)

    def _results_of_step(self, optimizer: AdamW, step: int, norm: float) -> Results:
        """Yield what a step leaves: the norm of its gradients, moments and parameters."""
        state, wide = optimizer.state(), np.float64 if self.target.dtype == torch.float64 else np.float32
        yield at("grad_norm", case=f"step {step}"), np.asarray(norm, wide)
        for stage, where in after(step, self.n_layers).items():
            kept = {
                name: optimizer.params[name] if stage == "parameters" else state[f"{name}.{MOMENTS[stage]}"]
                for name in where
            }
            complete = whole_together({name: tensor.detach() for name, tensor in kept.items()})
            for name, stage_ref in where.items():
                yield stage_ref, array_of(complete[name]).copy()

    def _curve(self) -> Results:
        stepper, found = self._stepper(self.adapter, CURVE.optimizer, SMOOTHING), []
        for step in range(1, CURVE.n_steps + 1):
            found.append(stepper.step(step_batches(self.batches, step, CURVE.accumulation), CURVE.rate(step)))
        losses, norms = zip(*found, strict=True)
        yield at("loss_curve", case="curve"), np.asarray(losses)
        yield at("norm_curve", case="curve"), np.asarray(norms)

    @torch.no_grad()
    def _merged_logits(self) -> np.ndarray:
        """Compute the logits of a model whose weights have the adapter merged in, rounded to float32 once."""
        merged = MergedWeights(self.weights, self.adapter)
        module = load_dense(merged, dtype=self.target.dtype, device=self.target.device, cut=self._cut)
        return self._tokens(self._logits(self._working(module)))


@torch.no_grad()
def _delta(lora_module: LoraModule, x: Tensor) -> Tensor:
    """Compute the adapter's addition to a result of zero, in the dtype of the adapter."""
    lora_B = lora_module.own(lora_module.lora_B[NAME])
    return lora_module.adapted(NAME, x, lora_B.new_zeros((*x.shape[:-1], len(lora_B))))


def _at_each_module(module: CausalLM, note: Callable[[LoraModule, str, Tensor], None]) -> None:
    """Call `note` with a module with an adapter, its matrix and its input, whenever the forward pass reaches one."""
    for _, target, lora_module in lora_modules(module):

        def noted(lora_module: LoraModule, inputs: tuple, name: str = target.name) -> None:
            note(lora_module, name, inputs[0])

        lora_module.register_forward_pre_hook(noted)


def _one_by_one(labels: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the labels of a batch once for each label, with all others ignored."""
    for row, column in zip(*np.nonzero(labels != IGNORED), strict=True):
        alone = np.full_like(labels, IGNORED)
        alone[row, column] = labels[row, column]
        yield alone


def _noting(
    found: dict[StageRef, Tensor], stage_ref: StageRef, given: tuple[Tensor, Tensor] | None
) -> Callable[..., tuple]:
    """Build a hook that keeps the gradient of a module's input, or of the tensor that replaces the input."""

    def note(_module: nn.Module, inputs: tuple) -> tuple:
        x = inputs[0] if given is None else given[0].clone()
        x = x if x.requires_grad else x.detach().requires_grad_()
        x.retain_grad()
        found[stage_ref] = x
        fed = x if given is None else _Border.apply(inputs[0], x, given[1])
        return fed, *inputs[1:]

    return note


class _Border(torch.autograd.Function):
    """Between two blocks that are judged alone: the second is given an input, the first a gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, given: Tensor, gradient: Tensor) -> Tensor:
        """Return the input of the second block."""
        ctx.save_for_backward(gradient)
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient that the first block is given, and the gradient that the second block computed."""
        (gradient,) = ctx.saved_tensors
        return (gradient if ctx.needs_input_grad[0] else None), grads[0], None


def _gradient_of(tensor: Tensor) -> Tensor:
    """Return the gradient of a tensor; zero where there is none, so that a cut graph is a wrong number."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def array_of(tensor: Tensor) -> np.ndarray:
    """Return a tensor as an array on the CPU; without a copy if it is there."""
    return tensor.detach().cpu().numpy()


def all_rows(worker: Alone, rows: Tensor, n_rows: int) -> Tensor:
    """Collect the values of all rows of a batch, given the rows that this rank computes."""
    if not isinstance(worker, OnMesh):
        return rows
    rank, found = worker.data_parallel.get_local_rank(), rows.new_zeros(n_rows, *rows.shape[1:])
    if rank < n_rows:
        found[rank :: worker.data_parallel.size()] = rows
    return worker.summed(found)


def own_input(worker: Alone, matrix: str, x: Tensor) -> Tensor:
    """Select the part of a matrix's input, by the matrix's canonical name, that this rank multiplies."""
    if not isinstance(worker, OnMesh) or not _is_one_of(matrix, ROWS):
        return x
    ranks = worker.tensor_parallel
    return x.chunk(ranks.size(), -1)[ranks.get_local_rank()]


def whole_output(worker: Alone, matrix: str, part: Tensor) -> Tensor:
    """Combine the output of a matrix on this rank with the outputs of the other ranks."""
    if not isinstance(worker, OnMesh):
        return part
    if _is_one_of(matrix, ROWS):
        return summed(part.clone(), worker.tensor_parallel)
    return gathered(part, -1, worker.tensor_parallel) if _is_one_of(matrix, COLUMNS) else part


def _is_one_of(matrix: str, paths: tuple[str, ...]) -> bool:
    """Tell if a matrix has the name of one of the paths' modules."""
    return matrix.endswith(tuple(path.rpartition(".")[2] for path in paths))
