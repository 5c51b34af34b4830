"""Runner of LoRA training in torch (validation points 15 to 20, without exported files), with the trainer's modules.

The trainer's `Stepper` computes gradients and steps. A runner yields arrays by stage reference. In *isolated* runs the
golden's arrays are the inputs: hooks replace the input of each block and the gradient of its output. *Chained* runs use
no golden after the initial adapter. In half precision, the base and its activations are half; the adapter, its
gradients and the optimizer are float32. The variant `-trainer` runs like `llorch lora train` when it saves memory:
fused attention, frozen products by oneDNN, gradient checkpointing, and logits in chunks. On a device mesh every rank
runs this variant, and all ranks yield whole arrays.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llorch.files import Weights
from llorch.judging.expectations.training import comparisons, make_expectations, stored, with_load_paths
from llorch.judging.expectations.training_refs import (
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
from llorch.judging.tolerances.training import NUMPY_ONLY
from llorch.judging.types import Comparison
from llorch.lora.adapter import Adapter
from llorch.lora.merge import MergedWeights
from llorch.ops.numerics import DtypeName
from llorch.pytorch.causal_lm import CausalLM, widened
from llorch.pytorch.device import Target
from llorch.pytorch.distributed.dtensor import gather_all, like, own, part_of
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

VARIANTS = {"": False, "-trainer": True}  # suffix of the backend name -> whether it runs as the trainer does
DTYPES = ("float32", "float64", *HALF_DTYPES)  # dtypes in which training is verified
NAME = "default"  # adapter name
CHUNK = 3  # rows of logits in a chunk, fewer than any batch has, so that there are several chunks
MOMENTS = {"first_moment": "m", "second_moment": "v"}  # stage -> key in the optimizer's state


def verify_training_torch(name: str, target: Target, mesh: DeviceMesh | None = None) -> Iterator[Comparison]:
    """Compare torch training in each of `VARIANTS` with a model's stored goldens; the target must have one of `DTYPES`.

    On a mesh, compare the combined arrays of all ranks in the trainer's variant; all ranks must call this function.
    """
    if target.dtype_name not in DTYPES:
        raise UserError(f"training: expected one of {', '.join(DTYPES)}, got {target}")
    if mesh is None:
        yield from compare_torch(name, *stored(name), target)
    else:
        yield from compare_mesh(name, *stored(name), target, mesh)


def compare_torch(name: str, weights: Weights, golden: TrainingGolden, target: Target) -> Iterator[Comparison]:
    """Compare training runs in torch with goldens, for each variant."""
    for suffix, as_trainer in VARIANTS.items():
        runner = TorchTrainingRunner(weights, golden, target, as_trainer=as_trainer)
        yield from _compare_runner(name, runner, f"{target}{suffix}")


def compare_mesh(
    name: str, weights: Weights, golden: TrainingGolden, target: Target, mesh: DeviceMesh
) -> Iterator[Comparison]:
    """Compare a training run of all ranks of a mesh with goldens; all ranks must call this function."""
    runner = TorchTrainingRunner(weights, golden, target, as_trainer=True, mesh=mesh)
    yield from _compare_runner(name, runner, named_on(target, mesh))


def _compare_runner(name: str, runner: "TorchTrainingRunner", backend: str) -> Iterator[Comparison]:
    """Compare the isolated and chained runs of a torch runner with the goldens of training."""
    dtype: DtypeName = runner.target.dtype_name  # pyright: ignore[reportAssignmentType]
    arrays = {ISOLATED: dict(runner.isolated()), CHAINED: dict(runner.chained())}
    expectations = make_expectations(runner.golden, runner.weights.config, dtype)
    yield from with_load_paths(comparisons(name, expectations, arrays, backend, left_out=NUMPY_ONLY), runner.golden)


class TorchTrainingRunner:
    """Runner of torch training for one golden on one device in one dtype, unchanged or as the trainer saves memory."""

    def __init__(
        self,
        weights: Weights,
        golden: TrainingGolden,
        target: Target,
        *,
        as_trainer: bool,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Prepare a runner without loading anything."""
        self.weights = weights.astype(np.float64) if target.dtype == torch.float64 else weights
        self.target, self.n_layers = target, weights.config.n_layers
        self.as_trainer, self.chunk = as_trainer, CHUNK if as_trainer else None
        self.batches = golden.batches
        self.adapter = golden.adapter_for(weights.config)
        self.rslora = golden.adapter_for(weights.config, RSLORA)
        self.golden, self._mesh = golden, mesh

    def isolated(self) -> Results:
        """Yield every stage that can run on the golden's inputs."""
        yield from self._deltas(self.adapter, of_matrices("lora_delta", self.n_layers))
        yield from self._deltas(self.rslora, shared_input("rslora"))
        yield from self._losses(self._padded(at("adapted_logits")), nn.Identity())  # the inputs are logits already
        yield from self._gradients(self.adapter, fed=True)
        for step in STEPS_ALONE:
            yield from self._optimizer_step(step)

    def chained(self) -> Results:
        """Yield the arrays of every complete run."""
        yield from self._forward()
        worker = self._worker(self.rslora)
        yield at("adapted_logits", case="rslora"), self._tokens(self._logits(worker))
        yield from self._gradients(self.adapter)
        stepper = self._stepper(with_zero_b(self.adapter), OPTIMIZER, 0.0)
        stepper.backward(self.batches[:1])
        yield from self._tensor_gradients(stepper, "zero_b")
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
        return self._as_worker(module.train())

    @property
    def _cut(self) -> Cut:
        return all_of if self._mesh is None else cut_for(self.weights.config, self._mesh)

    def _as_worker(self, module: CausalLM) -> Alone:
        return Alone(module) if self._mesh is None else OnMesh(module, self._mesh)

    def _hidden(self, worker: Alone) -> Tensor:
        """Compute the hidden states of all rows of the first batch; each rank computes its own rows."""
        rows, _ = worker.rows_of(self.batches[0])
        own_hidden = worker.run(lambda module: hidden_states(module, rows, self.target.device))
        return all_rows(worker, own_hidden.detach(), len(self.batches[0].ids))

    def _logits(self, worker: Alone) -> Tensor:
        hidden = self._hidden(worker)
        return worker.run(lambda module: module.lm_head(hidden))

    def _golden_tensor(self, stage_ref: StageRef, dtype: torch.dtype | None = None) -> Tensor:
        """Return a golden as tensor on the device of the run."""
        return torch.tensor(self.golden.shown(stage_ref), device=self.target.device, dtype=dtype or self.target.dtype)

    def _padded(self, stage_ref: StageRef) -> Tensor:
        """Arrange a golden, which has a row per token without padding, as rows of the first batch; padding is 0."""
        tokens = self._golden_tensor(stage_ref)
        is_token = torch.from_numpy(self.batches[0].documents >= 0)
        rows = tokens.new_zeros((*is_token.shape, tokens.shape[-1]))
        rows[is_token.to(rows.device)] = tokens
        return rows

    def _tokens(self, rows: Tensor) -> np.ndarray:
        """Return the entries of all tokens of the first batch without padding, as an array of at least float32."""
        return widened(rows.detach()).cpu().numpy()[self.batches[0].documents >= 0]

    def _deltas(self, adapter: Adapter, refs: Mapping[str, StageRef]) -> Results:
        """Yield the adapter's deltas: when the forward pass reaches a module, it also runs on the golden's input."""
        worker, deltas = self._worker(adapter), dict[str, Tensor]()

        def record(lora_module: LoraModule, name: str, _: Tensor) -> None:
            if name in refs:
                golden_input = self._golden_tensor(at(INPUT_OF[refs[name].part], refs[name].layer))
                deltas[name] = whole_output(worker, name, _delta(lora_module, own_input(worker, name, golden_input)))

        _record_each_module(worker.module, record)
        self._hidden(worker)
        for name, stage_ref in refs.items():
            yield stage_ref, array_of(deltas[name])

    def _forward(self) -> Results:
        """Yield the adapter's deltas on llorch's activations, the logits, and the losses, from one forward pass."""
        worker, deltas = self._worker(self.adapter), dict[str, Tensor]()

        def record(lora_module: LoraModule, name: str, x: Tensor) -> None:
            deltas[name] = whole_output(worker, name, _delta(lora_module, x))

        _record_each_module(worker.module, record)
        hidden = self._hidden(worker)
        for name, stage_ref in of_matrices("lora_delta", self.n_layers).items():
            yield stage_ref, self._tokens(all_rows(worker, deltas[name], len(hidden)))
        yield at("adapted_logits"), self._tokens(worker.run(lambda module: module.lm_head(hidden)))
        yield from worker.run(lambda module: list(self._losses(hidden, module.lm_head)))

    def _losses(self, hidden: Tensor, lm_head: nn.Module) -> Results:
        batch = self.batches[0]
        for case, smoothing in SMOOTHINGS.items():
            losses = [self._loss(hidden, lm_head, labels, smoothing) for labels in _single_labels(batch.labels)]
            yield at("token_losses", case=case), array_of(torch.stack(losses))
            mean = self._loss(hidden, lm_head, batch.labels, smoothing) / batch.n_trained
            yield at("loss", case=case), array_of(mean)

    def _loss(self, hidden: Tensor, lm_head: nn.Module, labels: np.ndarray, smoothing: float) -> Tensor:
        return loss_sum(hidden, lm_head, torch.from_numpy(labels), label_smoothing=smoothing, chunk=self.chunk)

    def _gradients(self, adapter: Adapter, *, fed: bool = False) -> Results:
        """Yield the gradients of every trained tensor and of block inputs, from one backward pass.

        If `fed`, each block is isolated: its input and the gradient of its output are the golden's.
        """
        stepper, inputs = self._stepper(adapter, OPTIMIZER, 0.0), dict[StageRef, Tensor]()
        worker, n_rows = stepper.worker, len(self.batches[0].ids)
        _, factor = worker.rows_of(self.batches[0])  # 0 on a rank that has no rows and only communicates
        model, ends = worker.module.model, borders(self.n_layers)
        for module, (x, d_x) in zip((*model.layers, model.norm), ends.items(), strict=True):
            goldens = (worker.own_rows(self._padded(x)), factor * worker.own_rows(self._padded(d_x))) if fed else None
            module.register_forward_pre_hook(_input_hook(inputs, d_x, goldens))
        stepper.backward(self.batches[:1])
        yield from self._tensor_gradients(stepper, "plain")
        for stage_ref, tensor in inputs.items():
            yield stage_ref, self._tokens(all_rows(worker, _gradient_of(tensor), n_rows))

    def _tensor_gradients(self, stepper: Stepper, case: str) -> Results:
        """Yield the stage reference and the gradient of every trained tensor."""
        stage_refs = of_tensors("gradient", self.n_layers, case)
        grads = gather_all({name: _gradient_of(stepper.optimizer.params[name]) for name in stage_refs})
        for name, stage_ref in stage_refs.items():
            yield stage_ref, array_of(grads[name])

    def _stepper(self, adapter: Adapter, recipe: OptimizerRecipe, smoothing: float) -> Stepper:
        """Build the `Stepper` that the trainer uses."""
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
            goldens = {stage: self._golden_tensor(refs[name], parameter.dtype) for stage, refs in start.items()}
            parameter.grad = like(parameter.data, part_of(goldens["gradient"], parameter.data).clone())
            if step > 1:
                own(parameter.data).copy_(part_of(goldens["parameters"], parameter.data))
                state |= {f"{name}.{kind}": goldens[stage] for stage, kind in MOMENTS.items()}
        if step > 1:
            optimizer.load(state)
        norm = optimizer.clip(OPTIMIZER.max_norm)
        optimizer.step(OPTIMIZER.learning_rate)
        yield from self._step_arrays(optimizer, step, norm)

    def _steps(self) -> Results:
        stepper = self._stepper(self.adapter, OPTIMIZER, 0.0)
        for step in range(1, max(STEPS_SHOWN) + 1):
            _, norm = stepper.step(step_batches(self.batches, step, 1), OPTIMIZER.learning_rate)
            if step in STEPS_SHOWN:
                yield from self._step_arrays(stepper.optimizer, step, norm)

    def _step_arrays(self, optimizer: AdamW, step: int, norm: float) -> Results:
        """Yield the gradient norm before clipping, and moments and parameters after the step."""
        state, norm_dtype = optimizer.state(), np.float64 if self.target.dtype == torch.float64 else np.float32
        yield at("grad_norm", case=f"step {step}"), np.asarray(norm, norm_dtype)
        for stage, refs in after(step, self.n_layers).items():
            tensors = {
                name: optimizer.params[name] if stage == "parameters" else state[f"{name}.{MOMENTS[stage]}"]
                for name in refs
            }
            whole_tensors = gather_all({name: tensor.detach() for name, tensor in tensors.items()})
            for name, stage_ref in refs.items():
                yield stage_ref, array_of(whole_tensors[name]).copy()

    def _curve(self) -> Results:
        stepper, steps = self._stepper(self.adapter, CURVE.optimizer, SMOOTHING), []
        for step in range(1, CURVE.n_steps + 1):
            steps.append(stepper.step(step_batches(self.batches, step, CURVE.accumulation), CURVE.rate(step)))
        losses, norms = zip(*steps, strict=True)
        yield at("loss_curve", case="curve"), np.asarray(losses)
        yield at("norm_curve", case="curve"), np.asarray(norms)

    @torch.no_grad()
    def _merged_logits(self) -> np.ndarray:
        """Compute the logits of a model whose weights have the adapter merged in, rounded to float32 once."""
        merged = MergedWeights(self.weights, self.adapter)
        module = load_dense(merged, dtype=self.target.dtype, device=self.target.device, cut=self._cut)
        return self._tokens(self._logits(self._as_worker(module)))


@torch.no_grad()
def _delta(lora_module: LoraModule, x: Tensor) -> Tensor:
    """Compute the adapter's addition alone, in the dtype of the adapter, by adding it to zeros."""
    lora_B = lora_module.own(lora_module.lora_B[NAME])
    return lora_module.adapted(NAME, x, lora_B.new_zeros((*x.shape[:-1], len(lora_B))))


def _record_each_module(module: CausalLM, record: Callable[[LoraModule, str, Tensor], None]) -> None:
    """Call `record(module, matrix name, input)` whenever the forward pass reaches a module with an adapter."""
    for _, target, lora_module in lora_modules(module):

        def record_input(lora_module: LoraModule, inputs: tuple, name: str = target.name) -> None:
            record(lora_module, name, inputs[0])

        lora_module.register_forward_pre_hook(record_input)


def _single_labels(labels: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the labels of a batch once for each label, with all other labels masked."""
    for row, column in zip(*np.nonzero(labels != IGNORED), strict=True):
        one_label = np.full_like(labels, IGNORED)
        one_label[row, column] = labels[row, column]
        yield one_label


def _input_hook(
    recorded: dict[StageRef, Tensor], stage_ref: StageRef, replacement: tuple[Tensor, Tensor] | None
) -> Callable[..., tuple]:
    """Build a hook that records a module's input; `replacement`: golden input, gradient for the module before it."""

    def feed(_module: nn.Module, inputs: tuple) -> tuple:
        x = inputs[0] if replacement is None else replacement[0].clone()
        x = x if x.requires_grad else x.detach().requires_grad_()
        x.retain_grad()
        recorded[stage_ref] = x
        module_input = x if replacement is None else _Border.apply(inputs[0], x, replacement[1])
        return module_input, *inputs[1:]

    return feed


class _Border(torch.autograd.Function):
    """Border between two isolated blocks: replaces the input of the second and the output gradient of the first."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, replacement: Tensor, gradient: Tensor) -> Tensor:
        """Return the input of the second block."""
        ctx.save_for_backward(gradient)
        return replacement.view_as(replacement)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the replaced gradient for the first block, and the gradient that the second block computed."""
        (gradient,) = ctx.saved_tensors
        return (gradient if ctx.needs_input_grad[0] else None), grads[0], None


def _gradient_of(tensor: Tensor) -> Tensor:
    """Return the gradient of a tensor; zeros if it has none, so that a broken graph fails as a wrong number."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def array_of(tensor: Tensor) -> np.ndarray:
    """Return a tensor as an array, without a copy if it is on the CPU."""
    return tensor.detach().cpu().numpy()


def all_rows(worker: Alone, rows: Tensor, n_rows: int) -> Tensor:
    """Combine the rows of a batch that all ranks compute; `rows` are this rank's, every n-th of the batch."""
    if not isinstance(worker, OnMesh):
        return rows
    rank, all_values = worker.data_parallel.get_local_rank(), rows.new_zeros(n_rows, *rows.shape[1:])
    if rank < n_rows:
        all_values[rank :: worker.data_parallel.size()] = rows
    return worker.summed(all_values)


def own_input(worker: Alone, matrix: str, x: Tensor) -> Tensor:
    """Select the part of a matrix's input that this rank multiplies; `matrix` is a name like `layers.0.q_proj`."""
    if not isinstance(worker, OnMesh) or not _is_one_of(matrix, ROWS):
        return x
    axis_mesh = worker.tensor_parallel
    return x.chunk(axis_mesh.size(), -1)[axis_mesh.get_local_rank()]


def whole_output(worker: Alone, matrix: str, part: Tensor) -> Tensor:
    """Combine this rank's output of a matrix with the outputs of the other ranks."""
    if not isinstance(worker, OnMesh):
        return part
    if _is_one_of(matrix, ROWS):
        return summed(part.clone(), worker.tensor_parallel)
    return gathered(part, -1, worker.tensor_parallel) if _is_one_of(matrix, COLUMNS) else part


def _is_one_of(matrix: str, paths: tuple[str, ...]) -> bool:
    """Check if a matrix has the name of one of the modules in `paths`."""
    return matrix.endswith(tuple(path.rpartition(".")[2] for path in paths))
