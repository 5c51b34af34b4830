"""Runner of LoRA training in NumPy (validation points 15 to 20): isolated on a golden's arrays, chained on llorch's.

A runner yields (stage reference, array). The dtype is that of the weights: float32 verifies the arithmetic, float64 the
mathematics. Chained runs start from the stored adapter and use no golden after that. Isolated gradients come from the
same code, but the golden replaces the input of each block and the gradient of its output.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from llorch.files import Weights
from llorch.judging.expectations.training_refs import (
    INPUT_OF,
    MERGED_REF,
    Arrays,
    after,
    at,
    before,
    borders,
    named,
    of_matrices,
    of_tensors,
    shared_input,
)
from llorch.judging.goldens.training import TrainingGolden
from llorch.judging.goldens.training_recipe import (
    CURVE,
    MERGED,
    OPTIMIZER,
    RSLORA,
    SCHEDULE_STEPS,
    SCHEDULE_WARMUP,
    SCHEDULES,
    SMOOTHING,
    SMOOTHINGS,
    STATE,
    STEPS_ALONE,
    STEPS_SHOWN,
    OptimizerRecipe,
    step_batches,
    with_zero_b,
)
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import Adapter
from llorch.lora.merge import MergedWeights
from llorch.model.backward import recorder
from llorch.model.blocks import forward
from llorch.model.cache import KVCache
from llorch.ops.cross_entropy import IGNORED, cross_entropy, shifted
from llorch.ops.linear import linear
from llorch.stages.stage_ref import StageRef
from llorch.stages.table import input_key, key
from llorch.training import adamw, numpy_step

Results = Iterator[tuple[StageRef, np.ndarray]]
Named = Mapping[str, np.ndarray]
State = Mapping[str, Named]  # stage of `STATE` -> arrays after an optimizer step, by flat tensor name


class NumpyTrainingRunner:
    """Runner of NumPy training for one golden, in the dtype of the weights."""

    def __init__(self, weights: Weights, golden: TrainingGolden) -> None:
        """Prepare a runner without computing anything."""
        self.weights, self.dtype, self.config = weights, weights.dtype, weights.config
        self.n_layers, self.batches = self.config.n_layers, golden.batches
        self.adapter = golden.adapter_for(self.config)
        self.rslora = golden.adapter_for(self.config, RSLORA)
        self._golden = golden

    def isolated(self, *numbers: str) -> Results:
        """Yield every stage that can run on the golden's inputs; `numbers` selects validation points, default all."""
        run_checkpoint: dict[str, Callable[[], Results]] = {
            "15": self._isolated_deltas,
            "16": lambda: self._losses(self._split(self._golden_array(at("adapted_logits")))),
            "17": self._isolated_gradients,
            "18": self._isolated_steps,
            "20": self._merged_weight,
        }
        for number in numbers or run_checkpoint:
            yield from run_checkpoint[number]() if number in run_checkpoint else ()

    def chained(self, *numbers: str) -> Results:
        """Yield the arrays of every complete run; `numbers` selects validation points, default all."""
        run_checkpoint: dict[str, Callable[[], Results]] = {
            "15": self._chained_deltas,
            "16": lambda: self._losses([trace["logits"] for trace in self._traces(self.adapter)]),
            "17": self._chained_gradients,
            "18": self._steps,
            "19": lambda: self.curve(CURVE.n_steps),
            "20": self.merged,
        }
        for number in numbers or run_checkpoint:
            yield from run_checkpoint[number]()

    def curve(self, n_steps: int) -> Results:
        """Run the first steps of the training curve; yield the arrays of losses and gradient norms."""
        steps = self._run_steps(n_steps, CURVE.accumulation, CURVE.optimizer, SMOOTHING, CURVE.rate)
        _, losses, norms, _ = zip(*steps, strict=True)
        yield at("loss_curve", case="curve"), np.asarray(losses)
        yield at("norm_curve", case="curve"), np.asarray(norms)

    def merged(self) -> Results:
        """Compute the logits of the model with the adapter merged in."""
        yield at("merged_logits"), logits_of(MergedWeights(self.weights, self.adapter), self._documents)

    @property
    def _documents(self) -> list[np.ndarray]:
        return [ids for ids, _ in self.batches[0].each_document()]

    def _isolated_deltas(self) -> Results:
        def golden_input(stage: str, layer: int | None) -> np.ndarray:
            return self._golden_array(at(stage, layer))

        yield from self._deltas(self.adapter, of_matrices("lora_delta", self.n_layers), golden_input)
        yield from self._deltas(self.rslora, shared_input("rslora"), golden_input)

    def _isolated_steps(self) -> Results:
        """Compute single optimizer steps from the golden's gradients and state, then learning-rate schedules."""
        for step in STEPS_ALONE:
            start = {name: self._golden_arrays(refs) for name, refs in before(step, self.n_layers).items()}
            state = start if step > 1 else self._initial_state()
            norm, state = self._update(step, start["gradient"], state, OPTIMIZER, OPTIMIZER.learning_rate)
            yield from self._step_arrays(step, norm, state)
        yield from self._schedules()

    def _merged_weight(self) -> Results:
        yield MERGED_REF, MergedWeights(self.weights, self.adapter).array(MERGED)

    def _chained_deltas(self) -> Results:
        """Compute deltas and logits of llorch's own forward passes."""
        traces = self._traces(self.adapter)
        inputs = lambda stage, layer: np.concatenate([trace[key(stage, layer)] for trace in traces])  # noqa: E731
        yield from self._deltas(self.adapter, of_matrices("lora_delta", self.n_layers), inputs)
        for case, case_traces in {"plain": traces, "rslora": self._traces(self.rslora)}.items():
            yield at("adapted_logits", case=case), np.concatenate([trace["logits"] for trace in case_traces])

    def _chained_gradients(self) -> Results:
        for case, adapter in {"plain": self.adapter, "zero_b": with_zero_b(self.adapter)}.items():
            _, grads = numpy_step.loss_and_gradients(self.weights, adapter, self.batches[:1], label_smoothing=0.0)
            yield from named(of_tensors("gradient", self.n_layers, case), grads).items()
        yield from join_documents([gradients for gradients, _ in self._block_gradients({})]).items()

    def _golden_array(self, stage_ref: StageRef) -> np.ndarray:
        """Return a golden in the dtype of the run."""
        return self._golden.shown(stage_ref).astype(self.dtype)

    def _golden_arrays(self, refs: Mapping[str, StageRef]) -> Named:
        return {name: self._golden_array(stage_ref) for name, stage_ref in refs.items()}

    def _split(self, tokens: np.ndarray) -> list[np.ndarray]:
        """Split an array with a row per token of the first batch by document."""
        return np.split(tokens, np.cumsum([len(ids) for ids in self._documents])[:-1])

    def _traces(self, adapter: Adapter) -> list[dict[str, np.ndarray]]:
        traces: list[dict[str, np.ndarray]] = [{} for _ in self._documents]
        for ids, trace in zip(self._documents, traces, strict=True):
            weights = AdaptedWeights(self.weights, adapter)
            forward(ids, weights, KVCache(self.config, self.dtype), keep=recorder(trace))
        return traces

    def _deltas(
        self, adapter: Adapter, refs: Mapping[str, StageRef], inputs: Callable[[str, int | None], np.ndarray]
    ) -> Results:
        """Yield the adapter's addition to each product; `inputs` returns the product's input by stage and layer."""
        weights = AdaptedWeights(self.weights, adapter)
        for name, stage_ref in refs.items():
            matrix, x = weights[name], inputs(INPUT_OF[stage_ref.part], stage_ref.layer)
            yield stage_ref, matrix.added(x, linear(x, matrix.base))

    def _losses(self, logits: Sequence[np.ndarray]) -> Results:
        for case, smoothing in SMOOTHINGS.items():
            sums, token_losses = [], []
            for rows, (_, labels) in zip(logits, self.batches[0].each_document(), strict=True):
                targets = shifted(labels)
                sums.append(cross_entropy(rows, targets, label_smoothing=smoothing))
                for row in np.flatnonzero(targets != IGNORED):
                    one_row = slice(row, row + 1)
                    token_losses.append(cross_entropy(rows[one_row], targets[one_row], label_smoothing=smoothing)[0])
            yield at("token_losses", case=case), np.asarray(token_losses, self.dtype)
            total, n_trained = map(sum, zip(*sums, strict=True))
            yield at("loss", case=case), np.asarray(total / n_trained, self.dtype)

    def _isolated_gradients(self) -> Results:
        """Run each block isolated: its input and the gradient of its output are the golden's."""
        ends = borders(self.n_layers)
        goldens = {stage_ref: self._golden_array(stage_ref) for stage_ref in (*ends, *ends.values())}
        per_document = list(self._block_gradients(goldens))
        tensors = of_tensors("gradient", self.n_layers)
        yield from join_documents([blocks for blocks, _ in per_document]).items()
        sums = {name: np.sum([grads[name] for _, grads in per_document], axis=0) for name in tensors}
        yield from named(tensors, sums).items()

    def _block_gradients(self, goldens: Arrays) -> Iterator[tuple[Arrays, Named]]:
        """Yield the gradients of every document: by blocks' inputs and the last block's output, and by every tensor.

        Arrays in `goldens` replace llorch's block inputs and gradients; llorch's gradients are recorded before that.
        """
        weights, batch = AdaptedWeights(self.weights, self.adapter), self.batches[0]
        parts, ends = {stage_ref: self._split(array) for stage_ref, array in goldens.items()}, borders(self.n_layers)
        inputs = {input_key(x.stage, x.layer, self.config): x for x in ends}
        gradients = {input_key(x.stage, x.layer, self.config) if x.layer is None else x.key: ends[x] for x in ends}
        for index, (ids, labels) in enumerate(batch.each_document()):
            recorded: Arrays = {}

            def keep(name: str, array: np.ndarray, index: int = index) -> np.ndarray:
                return parts[inputs[name]][index] if inputs.get(name) in parts else array

            def record(name: str, array: np.ndarray, index: int = index, recorded: Arrays = recorded) -> np.ndarray:
                if name not in gradients:
                    return array
                recorded[gradients[name]] = array
                return parts[gradients[name]][index] if gradients[name] in parts else array

            _, grads = numpy_step.document_gradients(
                ids, shifted(labels), weights, label_smoothing=0.0, n_trained=batch.n_trained, keep=keep,
                keep_gradient=record,
            )  # fmt: skip
            yield recorded, grads

    def _initial_state(self) -> State:
        """Return the initial state: the stored adapter, and moments of zero."""
        flat = {name: array.astype(self.dtype) for name, array in self.adapter.flat().items()}
        zero = {name: np.zeros_like(array) for name, array in flat.items()}
        return {stage: flat if stage == "parameters" else zero for stage in STATE}

    def _update(
        self, step: int, grads: Named, state: State, recipe: OptimizerRecipe, rate: float
    ) -> tuple[float, State]:
        """Clip and apply AdamW in step `step`, counted from 1; return the norm before clipping and the new state."""
        clipped, norm = adamw.clip_by_norm(grads, max_norm=recipe.max_norm)
        new: dict[str, dict[str, np.ndarray]] = {stage: {} for stage in STATE}
        for name, grad in clipped.items():
            new["parameters"][name], new["first_moment"][name], new["second_moment"][name] = adamw.adamw_step(
                state["parameters"][name], grad, state["first_moment"][name], state["second_moment"][name],
                step=step, lr=rate, betas=recipe.betas, eps=recipe.eps, weight_decay=recipe.weight_decay,
            )  # fmt: skip
        return norm, new

    def _run_steps(
        self, n_steps: int, accumulation: int, recipe: OptimizerRecipe, smoothing: float, rate: Callable[[int], float]
    ) -> Iterator[tuple[int, float, float, State]]:
        """Run optimizer steps from step 1; yield number, loss, gradient norm and state of each."""
        state = self._initial_state()
        for step in range(1, n_steps + 1):
            loss, grads = numpy_step.loss_and_gradients(
                self.weights, self.adapter, step_batches(self.batches, step, accumulation),
                label_smoothing=smoothing, parameters=state["parameters"],
            )  # fmt: skip
            norm, state = self._update(step, grads, state, recipe, rate(step))
            yield step, loss, norm, state

    def _steps(self) -> Results:
        steps = self._run_steps(max(STEPS_SHOWN), 1, OPTIMIZER, 0.0, lambda step: OPTIMIZER.learning_rate)
        for step, _, norm, state in steps:
            if step in STEPS_SHOWN:
                yield from self._step_arrays(step, norm, state)

    def _step_arrays(self, step: int, norm: float, state: State) -> Results:
        """Yield the gradient norm before clipping, and moments and parameters after the step."""
        yield at("grad_norm", case=f"step {step}"), np.asarray(norm, self.dtype)
        for stage, refs in after(step, self.n_layers).items():
            yield from named(refs, state[stage]).items()

    def _schedules(self) -> Results:
        for name in SCHEDULES:
            shared = {"schedule": name, "peak": OPTIMIZER.learning_rate, "warmup_steps": SCHEDULE_WARMUP}
            rates = [adamw.learning_rate(i, total_steps=SCHEDULE_STEPS, **shared) for i in range(SCHEDULE_STEPS)]
            yield at("learning_rate", case=name), np.asarray(rates)


def join_documents(documents: Sequence[Arrays]) -> Arrays:
    """Concatenate the tokens of all documents."""
    return {stage_ref: np.concatenate([arrays[stage_ref] for arrays in documents]) for stage_ref in documents[0]}


def logits_of(weights: Weights, documents: Sequence[np.ndarray]) -> np.ndarray:
    """Compute the logits of all documents, concatenated."""
    return np.concatenate([forward(ids, weights, KVCache(weights.config, weights.dtype)) for ids in documents])
