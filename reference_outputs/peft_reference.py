"""Training goldens from PEFT: its LoRA on an unmodified transformers model, torch's loss, autograd, clipping and AdamW.

The base is the one that the engine `transformers` loads, by default in float32. Deltas are the values that PEFT adds:
the product of the output of `lora_B` and the scaling, captured by a torch function mode. Gradients come from autograd,
those of block inputs from tensors that hooks retain. llorch computes nothing.

On a base in bfloat16 PEFT keeps adapter, gradients and optimizer in float32. The loss is computed from float32 logits,
as transformers' own loss is.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from llorch.engines.transformers import Transformers
from llorch.families.config import ModelConfig
from llorch.judging.expectations.training_refs import (
    INPUT_OF,
    MERGED_REF,
    Arrays,
    after,
    at,
    borders,
    named,
    of_matrices,
    of_tensors,
)
from llorch.judging.goldens.training_recipe import (
    CURVE,
    MERGED,
    OPTIMIZER,
    SCHEDULE_STEPS,
    SCHEDULE_WARMUP,
    SCHEDULES,
    SMOOTHING,
    SMOOTHINGS,
    OptimizerRecipe,
    step_batches,
)
from llorch.lora.adapter import LORA_A, LORA_B, Adapter
from llorch.lora.config import LoraConfig
from llorch.ops.numerics import DtypeName
from llorch.stages.stage_ref import StageRef
from llorch.training.batch import IGNORED, Batch

IN_TORCH = {"first_moment": "exp_avg", "second_moment": "exp_avg_sq", "parameters": "parameters"}
SCHEDULE_MAKERS: Mapping[str, Callable[..., Any]] = {
    "constant": lambda optimizer, warmup, total: transformers.get_constant_schedule_with_warmup(optimizer, warmup),
    "linear": transformers.get_linear_schedule_with_warmup,
    "cosine": transformers.get_cosine_schedule_with_warmup,
}


class Peft:
    """The reference engine `peft`: one base model, one adapter at a time."""

    name = "peft"

    def __init__(self, path: str | Path, *, n_threads: int | None = None, dtype: DtypeName = "float32") -> None:
        """Load a base model; float64 is refused outside `float64_everywhere`: PEFT and torch name float32 there."""
        if dtype == "float64" and torch.get_default_dtype() != torch.float64:
            raise RuntimeError("peft: expected a float64 run inside float64_everywhere, got one outside")
        self._path, self._n_threads = path, n_threads
        self._dtype: DtypeName = dtype
        with self._base() as base:
            self.config: ModelConfig = base.config
            self._provenance = base.provenance()
            self._n_threads = base.n_threads
        torch.set_num_threads(self._n_threads)  # its models outlive the bases that they are made of

    def adapted(self, adapter: Adapter) -> Any:
        """Load a fresh base with a copy of an adapter on it, in training mode, without any dropout of the base."""
        with _quiet():
            base = without_dropout(self._base()._model)
            model = peft.get_peft_model(base, peft.LoraConfig(**peft_settings(adapter.config)))
        parameters = trained(model)
        arrays = adapter.flat()
        if parameters.keys() != arrays.keys():
            raise RuntimeError(
                f"peft: expected the adapter's tensors, got others: {sorted(parameters.keys() ^ arrays.keys())[:5]}"
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(torch.from_numpy(arrays[name]))
        return model.train()

    def forward(self, adapter: Adapter, batch: Batch, *, case: str = "plain") -> Arrays:
        """Compute the inputs of the adapted projections, the values that PEFT adds to their outputs, and the logits.

        The tokens of all rows are concatenated.
        """
        model, stage_tensors = self.adapted(adapter), {}
        with torch.no_grad(), Watch(model, adapter, stage_tensors, case=case):
            stage_tensors[at("adapted_logits", case=case)] = logits_of(model, batch)
        return {stage_ref: tokens_of(tensor, batch) for stage_ref, tensor in stage_tensors.items()}

    def losses(self, adapter: Adapter, batch: Batch) -> Arrays:
        """Compute the mean loss over the tokens in the loss, and each token's loss, with and without smoothing."""
        with torch.no_grad():
            return losses_of(logits_of(self.adapted(adapter), batch), batch)

    def gradients(self, adapter: Adapter, batch: Batch, *, case: str = "plain") -> Arrays:
        """Compute the gradients of every trained tensor, of the blocks' inputs and of the last block's output.

        The inputs themselves are in the result too.
        """
        model, blocks, ends = self.adapted(adapter), dict[StageRef, Tensor](), borders(self.config.n_layers)
        with capture_blocks(model, blocks):
            accumulate(model, [batch], smoothing=0.0)
        out = {stage_ref: tokens_of(tensor, batch) for stage_ref, tensor in blocks.items()}
        out |= {ends[stage_ref]: tokens_of(gradient_of(tensor), batch) for stage_ref, tensor in blocks.items()}
        return out | named(of_tensors("gradient", self.config.n_layers, case), gradients_of(model))

    def steps(
        self,
        adapter: Adapter,
        steps: Sequence[Sequence[Batch]],
        recipe: OptimizerRecipe,
        *,
        recorded_steps: Sequence[int],
    ) -> Arrays:
        """Run AdamW steps with clipping at a constant rate, from an adapter and the micro-batches of every step.

        For the steps `recorded_steps`, counted from 1, return the gradients before clipping and their norm, and the
        moments and parameters after the step.
        """
        model, arrays = self.adapted(adapter), Arrays()
        optimizer = optimizer_of(model, recipe)
        for step, batches in enumerate(steps, start=1):
            self._backward(model, batches)
            gradients = named(of_tensors("given", self.config.n_layers, f"step {step}"), gradients_of(model))
            step_arrays = updated(model, optimizer, recipe, step)
            if step in recorded_steps:
                arrays |= gradients | step_arrays
            optimizer.zero_grad()
        return arrays

    def curve(self, adapter: Adapter, batches: Sequence[Batch]) -> Arrays:
        """Record loss and norm of every step, with a cosine schedule."""
        model, losses, norms = self.adapted(adapter), list[float](), list[float]()
        optimizer = optimizer_of(model, CURVE.optimizer)
        schedule = SCHEDULE_MAKERS["cosine"](optimizer, CURVE.warmup_steps, CURVE.n_steps)
        for step in range(1, CURVE.n_steps + 1):
            batches_of_step = step_batches(batches, step, CURVE.accumulation)
            losses.append(accumulate(model, batches_of_step, smoothing=SMOOTHING))
            norms.append(float(clip(model, CURVE.optimizer)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return {at("loss_curve", case="curve"): np.asarray(losses), at("norm_curve", case="curve"): np.asarray(norms)}

    def merged(self, adapter: Adapter, batch: Batch) -> Arrays:
        """Merge the adapter by PEFT; return the logits after it, and the merged matrix that is stored."""
        model = self.adapted(adapter).merge_and_unload()
        with torch.no_grad():
            logits = tokens_of(logits_of(model, batch), batch)
        matrix = model.get_parameter(f"{adapter.targets[MERGED].path}.weight")
        return {at("merged_logits"): logits, MERGED_REF: array_of(matrix)}

    @staticmethod
    def schedules() -> Arrays:
        """Compute the learning rates of all steps by transformers' schedules."""
        return {at("learning_rate", case=name): _rates(SCHEDULE_MAKERS[name]) for name in SCHEDULES}

    def saved(self, adapter: Adapter, folder: Path) -> Path:
        """Let PEFT save an adapter, as users get it from there; the file of tensors."""
        self.adapted(adapter).save_pretrained(folder, save_embedding_layers=False)
        return folder / "adapter_model.safetensors"

    def loaded(self, folder: Path, batch: Batch) -> np.ndarray:
        """Compute the logits with an adapter that PEFT loads from a folder."""
        with _quiet():
            model = peft.PeftModel.from_pretrained(self._base()._model, folder).eval()
        with torch.no_grad():
            return tokens_of(logits_of(model, batch), batch)

    def _backward(self, model: Any, batches: Sequence[Batch]) -> None:
        """Compute the gradients of one step of `steps`, without smoothing."""
        accumulate(model, batches, smoothing=0.0)

    def _base(self) -> Transformers:
        return Transformers(self._path, n_threads=self._n_threads, dtype=self._dtype)

    def provenance(self) -> dict[str, object]:
        """Return the facts about a golden's origin that the golden must state."""
        return self._provenance | {"producer": self.name, "peft": peft.__version__, "optimizer": "torch.optim.AdamW"}


def _rates(maker: Callable[..., Any]) -> np.ndarray:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=OPTIMIZER.learning_rate)
    schedule = maker(optimizer, SCHEDULE_WARMUP, SCHEDULE_STEPS)
    rates = []
    for _ in range(SCHEDULE_STEPS):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return np.asarray(rates)


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every dropout of a model to 0, whatever config.json says: the recipes train without dropout.

    transformers copies the settings into modules when it makes them: `attention_dropout`, `resid_pdrop` and others.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if name.endswith(("dropout", "dropout_prob", "pdrop")) and isinstance(value, int | float):
                setattr(module, name, 0.0)
    return model


def peft_settings(lora: LoraConfig) -> dict[str, Any]:
    """Translate llorch's configuration to PEFT's names."""
    return {
        "task_type": "CAUSAL_LM",
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "target_modules": list(lora.target_modules),
        "lora_dropout": lora.lora_dropout,
        "use_rslora": lora.use_rslora,
        "rank_pattern": dict(lora.rank_pattern),
        "alpha_pattern": dict(lora.alpha_pattern),
    }


def trained(model: Any) -> dict[str, nn.Parameter]:
    """Collect the trained parameters under flat names, in the order of the forward pass."""
    parameters = {_flat_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    order = list(of_tensors("parameters", model.config.num_hidden_layers))
    return {name: parameters[name] for name in sorted(parameters, key=order.index)}


def gradients_of(model: Any) -> dict[str, np.ndarray]:
    """Collect the gradient of every trained parameter."""
    return {name: array_of(gradient_of(parameter)) for name, parameter in trained(model).items()}


def gradient_of(tensor: Tensor) -> Tensor:
    """Return the gradient of a tensor; assert that there is one."""
    assert tensor.grad is not None
    return tensor.grad


def logits_of(model: Any, batch: Batch) -> Tensor:
    """Compute the logits of every slot of a batch; padding is masked."""
    mask = torch.from_numpy((batch.documents >= 0).astype(np.int64))
    return model(input_ids=torch.from_numpy(batch.ids), attention_mask=mask, use_cache=False).logits


def token_losses(logits: Tensor, batch: Batch, *, smoothing: float, reduction: str) -> Tensor:
    """Compute torch's cross entropy of the next tokens."""
    labels = torch.from_numpy(batch.labels)[:, 1:].reshape(-1)
    return cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]).float(), labels,
        ignore_index=IGNORED, label_smoothing=smoothing, reduction=reduction,
    )  # fmt: skip


def losses_of(logits: Tensor, batch: Batch) -> Arrays:
    """Compute the mean loss over the tokens in the loss, and each token's loss, with and without smoothing."""
    in_loss, arrays = torch.from_numpy(batch.labels)[:, 1:].reshape(-1) != IGNORED, Arrays()
    for case, smoothing in SMOOTHINGS.items():
        mean, losses = (token_losses(logits, batch, smoothing=smoothing, reduction=kind) for kind in ("mean", "none"))
        arrays |= {at("loss", case=case): array_of(mean), at("token_losses", case=case): array_of(losses[in_loss])}
    return arrays


def clip(model: Any, recipe: OptimizerRecipe) -> Tensor:
    """Clip the gradients with torch; return their norm before it."""
    return torch.nn.utils.clip_grad_norm_(trained(model).values(), recipe.max_norm)


class Watch(TorchFunctionMode):
    """Hooks that record the inputs of projections, and the product of each `lora_B` output and its scaling."""

    def __init__(self, model: Any, adapter: Adapter, stage_tensors: dict[StageRef, Tensor], *, case: str) -> None:
        """Register hooks on PEFT's model; they write into `stage_tensors`."""
        super().__init__()
        self._stage_tensors, self._outputs = stage_tensors, {}
        self._hooks = ExitStack()
        n_layers, inner = model.config.num_hidden_layers, model.base_model.model
        for name, stage_ref in of_matrices("lora_delta", n_layers, case).items():
            path = adapter.targets[name].path
            hook = self._input_hook(at(INPUT_OF[stage_ref.part], stage_ref.layer, case=case))
            self._hooks.enter_context(inner.get_submodule(path).register_forward_pre_hook(hook))
            hook = self._output_hook(stage_ref)
            self._hooks.enter_context(inner.get_submodule(f"{path}.lora_B.default").register_forward_hook(hook))

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._hooks.close()

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        """Run a function of torch; keep its result if it scales the output of a watched module."""
        result: Any = func(*args, **(kwargs or {}))
        if func in (Tensor.mul, Tensor.__mul__) and id(args[0]) in self._outputs:
            stage_ref, _ = self._outputs.pop(id(args[0]))
            self._stage_tensors[stage_ref] = result.detach().clone()
        return result

    def _input_hook(self, stage_ref: StageRef) -> Callable[..., None]:
        return lambda _module, inputs: self._stage_tensors.update({stage_ref: inputs[0].detach().clone()})

    def _output_hook(self, stage_ref: StageRef) -> Callable[..., None]:
        return lambda _module, _inputs, output: self._outputs.update({id(output): (stage_ref, output)})


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence a warning of transformers: PEFT looks up names that transformers has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


@contextmanager
def capture_blocks(
    model: Any, block_inputs: dict[StageRef, Tensor], replacements: Mapping[StageRef, Tensor] | None = None
) -> Iterator[list[Tensor]]:
    """Record the input of each block and the last block's output, with gradients, or replace them.

    Yields the outputs of the blocks.
    """

    def hook(stage_ref: StageRef) -> Callable[..., tuple]:
        def enter(_module: Any, inputs: tuple) -> tuple:
            x = inputs[0] if replacements is None else replacements[stage_ref]
            x = x if x.requires_grad else x.detach().requires_grad_()  # a frozen input has no gradient otherwise
            x.retain_grad()
            block_inputs[stage_ref] = x
            return x, *inputs[1:]

        return enter

    decoder, block_outputs = model.base_model.model.model, list[Tensor]()
    with ExitStack() as hooks:
        for stage_ref, module in zip(borders(len(decoder.layers)), (*decoder.layers, decoder.norm), strict=True):
            hooks.enter_context(module.register_forward_pre_hook(hook(stage_ref)))
        for layer in decoder.layers:
            hooks.enter_context(layer.register_forward_hook(lambda _module, _inputs, out: block_outputs.append(out)))
        yield block_outputs


def accumulate(model: Any, batches: Sequence[Batch], *, smoothing: float) -> float:
    """Run the backward passes of a step; return its loss: the sum over tokens in the loss, divided by their number."""
    n_trained = sum(batch.n_trained for batch in batches)
    total = 0.0
    for batch in batches:
        loss = token_losses(logits_of(model, batch), batch, smoothing=smoothing, reduction="sum") / n_trained
        loss.backward()
        total += loss.item()
    return total


def optimizer_of(model: Any, recipe: OptimizerRecipe) -> torch.optim.AdamW:
    """Make torch's AdamW; it updates one tensor at a time."""
    return torch.optim.AdamW(
        trained(model).values(), lr=recipe.learning_rate, betas=recipe.betas, eps=recipe.eps,
        weight_decay=recipe.weight_decay, foreach=False, fused=False,
    )  # fmt: skip


def updated(model: Any, optimizer: torch.optim.AdamW, recipe: OptimizerRecipe, step: int) -> Arrays:
    """Clip, make a step, and return the norm before clipping and the moments and parameters after the step."""
    arrays = {at("grad_norm", case=f"step {step}"): array_of(clip(model, recipe))}
    optimizer.step()
    for stage, stage_refs in after(step, model.config.num_hidden_layers).items():
        tensors = {name: {"parameters": p, **optimizer.state[p]}[IN_TORCH[stage]] for name, p in trained(model).items()}
        arrays |= named(stage_refs, {name: array_of(tensor) for name, tensor in tensors.items()})
    return arrays


def _flat_name(name: str) -> str:
    """Shorten `base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight` to `layers.0.q_proj.lora_A`."""
    parts = name.split(".")
    start = parts.index("layers")
    kind = LORA_A if LORA_A in parts else LORA_B
    return ".".join((*parts[start : start + 2], parts[parts.index(kind) - 1], kind))


def tokens_of(tensor: Tensor, batch: Batch) -> np.ndarray:
    """Select the slots that hold tokens, row after row."""
    return array_of(tensor[torch.from_numpy(batch.documents >= 0)])


def array_of(tensor: Tensor) -> np.ndarray:
    """Copy a tensor; dtypes narrower than float32 widen to float32, or to float64 inside `float64_everywhere`."""
    return tensor.detach().float().contiguous().numpy().copy()
