"""Functions with a known mistake, as a learner might type them, made from the mistakes of `llorch.diagnosis.mistakes`.

`Mistake.wrong` maps a right function to a wrong one: the exercise's reference, or a function of llorch that this module
adapts to the exercise's parameters. `our_x` is llorch's function, which an installed exercise replaces only as `x`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any

import numpy as np

from llorch.apps.learn.exercise import Call, Exercise
from llorch.apps.learn.exercises.after_logits import our_q4_0, our_q8_0
from llorch.apps.learn.exercises.forward import LINEAR, RMS_NORM, ROPE, SWIGLU, our_linear
from llorch.apps.learn.exercises.training import in_one_row, our_adamw_step, our_clip_by_norm, our_lora_backward
from llorch.diagnosis.mistakes import MISTAKES, QUANTISED, TRAINING, Mistake, QuantisedInputs
from llorch.diagnosis.mistakes.planting import find_owner, instead, replace_all, replaced
from llorch.files.quant import GGMLType
from llorch.lora.config import LoraConfig
from llorch.lora.targets import LoraTarget
from llorch.ops.linear import linear_backward

RIGHT_DECODERS = {GGMLType.Q8_0: our_q8_0, GGMLType.Q4_0: our_q4_0}
FLOATS = (np.float32, np.float64)
BLOCK_SIZE = 32  # values per block of Q8_0 or Q4_0
Tensor = Any  # of torch, which only lesson 14 imports
MakeFunctions = Callable[[Exercise], Mapping[str, Call]]  # makes {name of the mistake: wrong function}


def make_typed_mistakes(exercise: Exercise) -> Mapping[str, Call]:
    """Make the wrong functions of an exercise, by name of the mistake."""
    return {name: _in_dtype(function) for name, function in SPECIAL.get(exercise.name, _apply_all)(exercise).items()}


def _apply_all(exercise: Exercise) -> Mapping[str, Call]:
    """Apply each known mistake to the reference of an exercise; return the functions by name of the mistake."""
    return {
        **{mistake.name: mistake.wrong(exercise.reference) for mistake in _find_mistakes(exercise.name)},
        **_type_training(exercise),
    }


def _find_mistakes(name: str) -> list[Mistake[Any]]:
    return [mistake for mistake in MISTAKES.values() if mistake.part == name]


def _in_dtype(function: Call) -> Call:
    """Round results to the dtype of the arguments, because some known mistakes compute in float64."""

    @wraps(function)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        dtypes = [value.dtype for value in (*args, *kwargs.values()) if getattr(value, "dtype", None) in FLOATS]
        returned = function(*args, **kwargs)
        if isinstance(returned, tuple):
            return tuple(_round_to(value, dtypes) for value in returned)
        return _round_to(returned, dtypes)

    return wrong


def _round_to(array: Any, dtypes: Sequence[np.dtype]) -> Any:
    """Round a float array to the first of some dtypes, unless it already has one of them."""
    is_wider = isinstance(array, np.ndarray) and array.dtype in FLOATS and array.dtype not in dtypes
    return array.astype(dtypes[0]) if is_wider and dtypes else array


def _both_caches(exercise: Exercise) -> Mapping[str, Call]:
    """Apply mistakes of appending to one cache to both the key cache and the value cache."""

    def apply_to_both(append_one: Call) -> Call:
        def append(past_k: np.ndarray, past_v: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
            new_k, new_v = k.swapaxes(0, 1), v.swapaxes(0, 1)
            return append_one(past=past_k, new=new_k), append_one(past=past_v, new=new_v)

        return append

    def append_rows(past: np.ndarray, new: np.ndarray) -> np.ndarray:
        return np.concatenate([past, new], axis=1)

    return {mistake.name: apply_to_both(mistake.wrong(append_rows)) for mistake in _find_mistakes(exercise.name)}


def _mistaken_decoders(exercise: Exercise) -> Mapping[str, Call]:
    """Make a wrong decoder for each decoding mistake of the exercise's block type."""
    kind = GGMLType[exercise.name.upper()]

    def make_decoder(mistake: Mistake[QuantisedInputs]) -> Call:
        def wrong(blocks: np.ndarray) -> np.ndarray:
            shape, no_inputs = (len(blocks), BLOCK_SIZE), np.empty((0, 0), np.float32)
            with replaced(exercise.replaces, instead(RIGHT_DECODERS[kind])):  # not the learner's installed function
                return mistake.result(QuantisedInputs(kind, blocks, shape, no_inputs), "decode").reshape(shape)

        return wrong

    mistakes = (mistake for mistake in QUANTISED if "decode" in mistake.stages and kind.name in mistake.cases)
    return {mistake.name: make_decoder(mistake) for mistake in mistakes}


def _attention_outputs(exercise: Exercise) -> Mapping[str, Call]:
    def with_linear(linear: Call) -> Call:
        def attention_output(context: np.ndarray, o_proj: np.ndarray, o_bias: np.ndarray | None) -> np.ndarray:
            return linear(x=context, weight=o_proj, bias=o_bias)

        return attention_output

    return _mistaken_products("attn_out", with_linear)


def _feed_forwards(exercise: Exercise) -> Mapping[str, Call]:
    """Make wrong feed-forward layers: a wrong down projection, or another mistake of the whole layer."""

    def with_linear(linear: Call) -> Call:
        def feed_forward(
            h: np.ndarray, gate_proj: np.ndarray, up_proj: np.ndarray, down_proj: np.ndarray
        ) -> np.ndarray:
            act = SWIGLU.reference(gate=our_linear(h, gate_proj), up=our_linear(h, up_proj))
            return linear(x=act, weight=down_proj, bias=None)

        return feed_forward

    return {**_apply_all(exercise), **_mistaken_products("ffn_out", with_linear)}


def _logits_mistakes(exercise: Exercise) -> Mapping[str, Call]:
    """Make wrong logits: a wrong product, or another mistake of the whole function."""

    def with_linear(linear: Call) -> Call:
        def logits(
            x: np.ndarray, final_norm: np.ndarray, lm_head: np.ndarray | None, embed_tokens: np.ndarray, eps: float
        ) -> np.ndarray:
            normed = RMS_NORM.reference(x=x, weight=final_norm, eps=eps)
            return linear(x=normed, weight=embed_tokens if lm_head is None else lm_head, bias=None)

        return logits

    return {**_apply_all(exercise), **_mistaken_products("logits", with_linear)}


def _mistaken_products(stage: str, with_linear: Callable[[Call], Call]) -> Mapping[str, Call]:
    """Build a function around each wrong matrix product that a stage can have."""
    mistakes = (mistake for mistake in _find_mistakes("linear") if stage in mistake.stages)
    return {mistake.name: with_linear(mistake.wrong(LINEAR.reference)) for mistake in mistakes}


def _torch_norms(exercise: Exercise) -> Mapping[str, Call]:
    """Adapt the wrong norms of lesson 01 to torch tensors."""

    def on_tensors(function: Call) -> Call:
        def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            return _to_tensor(x, function(x=_to_array(x), weight=_to_array(weight), eps=eps))

        return rms_norm

    return {name: on_tensors(function) for name, function in make_typed_mistakes(RMS_NORM).items()}


def _torch_ropes(exercise: Exercise) -> Mapping[str, Call]:
    """Adapt the wrong RoPE functions of lesson 01b to torch tensors, one row of the batch at a time."""

    def on_tensors(function: Call) -> Call:
        def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            tables = (np.broadcast_to(_to_array(table, np.float64), (len(x), *table.shape[1:])) for table in (cos, sin))
            rows = [function(x=row, cos=c, sin=s) for row, c, s in zip(_to_array(x), *tables, strict=True)]
            return _to_tensor(x, np.stack(rows))

        return rope

    return {name: on_tensors(function) for name, function in make_typed_mistakes(ROPE).items()}


def _to_array(tensor: Tensor, dtype: type[np.floating] = np.float32) -> np.ndarray:
    return tensor.detach().float().cpu().numpy().astype(dtype, copy=False)


def _to_tensor(x: Tensor, array: np.ndarray) -> Tensor:
    """Convert an array to a tensor with the dtype and device of `x`."""
    return x.new_tensor(array, dtype=x.dtype)


SPECIAL: Mapping[str, MakeFunctions] = {
    "append": _both_caches,
    "attention_output": _attention_outputs,
    "feed_forward": _feed_forwards,
    "logits": _logits_mistakes,
    "q8_0": _mistaken_decoders,
    "q4_0": _mistaken_decoders,
    "torch_rms_norm": _torch_norms,
    "torch_rope": _torch_ropes,
}


Array = np.ndarray
TrainingAdapter = Callable[[Mistake[Any], Exercise], Call]  # makes the wrong function of the exercise


def _type_training(exercise: Exercise) -> Mapping[str, Call]:
    """Make the wrong functions of a training exercise, by name of the mistake; none for other exercises."""
    adapters = TRAINING_ADAPTERS.get(exercise.name, {exercise.replaces: _call_by_position})
    return {mistake.name: adapters[mistake.part](mistake, exercise) for mistake in TRAINING if mistake.part in adapters}


def _call_by_position(mistake: Mistake[Any], exercise: Exercise) -> Call:
    """Call the wrong function as llorch calls the right one: arrays by position, other arguments by keyword."""
    wrong, signature = mistake.wrong(exercise.reference), inspect.signature(exercise.reference)

    def call(*args: object, **kwargs: object) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        arrays = [value for value in arguments.values() if isinstance(value, Array)]
        settings = {name: value for name, value in arguments.items() if not isinstance(value, Array)}
        return wrong(*arrays, **settings)

    return call


def _wrong_scaling(mistake: Mistake[Any], exercise: Exercise) -> Call:
    """Build a LoRA config from the exercise's settings; one matrix, `own`, may override rank and alpha."""

    def right(config: LoraConfig, target: LoraTarget) -> float:
        pattern = {"own_r": config.rank_of(target), "own_alpha": config.alpha_of(target)}
        return exercise.reference(r=config.r, lora_alpha=config.lora_alpha, use_rslora=config.use_rslora, **pattern)

    def lora_scaling(r: int, lora_alpha: float, own_r: int | None, own_alpha: float | None, use_rslora: bool) -> float:
        config = LoraConfig(
            r=r, lora_alpha=lora_alpha, use_rslora=use_rslora, rank_pattern={} if own_r is None else {"own": own_r},
            alpha_pattern={} if own_alpha is None else {"own": own_alpha},
        )  # fmt: skip
        return mistake.wrong(right)(config, SimpleNamespace(path="own"))

    return lora_scaling


def _wrong_labels(mistake: Mistake[Any], exercise: Exercise) -> Call:
    def masked_labels(ids: Array, learned: Array) -> Array:
        documents = mistake.wrong(lambda batch: [(ids, exercise.reference(ids=ids, learned=learned))])
        return next(iter(documents(None)))[1]

    return masked_labels


def _add_frozen(mistake: Mistake[Any], exercise: Exercise) -> Call:
    """Add the gradient through the frozen matrix, which llorch computes elsewhere."""

    def lora_backward(
        grad: Array, x: Array, weight: Array, lora_A: Array, lora_B: Array, scaling: float
    ) -> tuple[Array, Array, Array]:
        d_x, d_A, d_B = mistake.wrong(our_lora_backward)(grad, x, lora_A, lora_B, scaling=scaling)
        return linear_backward(grad, weight) + d_x, d_A, d_B

    return lora_backward


def _wrong_lora_backward(mistake: Mistake[Any], exercise: Exercise) -> Call:
    """Make a wrong backward pass of a LoRA matrix, with the parameters of the exercise."""

    def lora_backward(
        grad: Array, x: Array, weight: Array, lora_A: Array, lora_B: Array, scaling: float
    ) -> tuple[Array, Array, Array]:
        def right(matrix: object, grad: Array, x: Array) -> tuple[Array, dict[str, Array]]:
            d_x, d_A, d_B = exercise.reference(grad, x, weight, lora_A, lora_B, scaling)
            return d_x, {"lora_A": d_A, "lora_B": d_B}

        d_x, trained = mistake.wrong(right)(SimpleNamespace(base=weight), grad, x)
        return d_x, trained["lora_A"], trained["lora_B"]

    return lora_backward


def _wrong_residual(mistake: Mistake[Any], exercise: Exercise) -> Call:
    def residual_backward(grad: Array, through: Array) -> Array:
        return mistake.wrong(lambda d_out: exercise.reference(grad=d_out, through=through))(grad)

    return residual_backward


def _wrong_clip(mistake: Mistake[Any], exercise: Exercise) -> Call:
    wrong = mistake.wrong(our_clip_by_norm)

    def clip_by_norm(grads: Mapping[str, Array], max_norm: float) -> tuple[Array, float]:
        clipped, norm = wrong(grads, max_norm=max_norm)
        return in_one_row(clipped), norm

    return clip_by_norm


def _wrong_step_part(mistake: Mistake[Any], exercise: Exercise) -> Call:
    """Run llorch's AdamW step with a wrong inner function, and with the second function that is usually wrong too."""
    changes = mistake.changes(along=True)
    replacements = [(name, instead(wrong(getattr(*find_owner(name))))) for name, wrong in changes]  # once: some count

    def step(*arrays: Array, **settings: object) -> tuple[Array, ...]:
        with replace_all(replacements):
            return our_adamw_step(*arrays, **settings)

    return _with_betas(step)


def _with_betas(wrong: Call) -> Call:
    def adamw_step(
        param: Array, grad: Array, m: Array, v: Array, step: int, lr: float, beta1: float, beta2: float, eps: float,
        weight_decay: float,
    ) -> tuple[Array, ...]:  # fmt: skip
        settings = {"step": step, "lr": lr, "eps": eps, "weight_decay": weight_decay}
        return wrong(param, grad, m, v, betas=(beta1, beta2), **settings)

    return adamw_step


def _wrong_accumulation(mistake: Mistake[Any], exercise: Exercise) -> Call:
    """Give the mistake indices of micro-batches as batches, so that it computes from the exercise's sums."""

    def accumulated(loss_sums: Array, n_trained: Array, grad_sums: Array) -> tuple[float, Array]:
        def right(weights: None, adapter: None, batches: list[int], **kwargs: object) -> tuple[float, dict[str, Array]]:
            loss, grad = exercise.reference(loss_sums[batches], n_trained[batches], grad_sums[batches])
            return loss, {"all": grad}

        loss, grads = mistake.wrong(right)(None, None, [*range(len(n_trained))])
        return loss, grads["all"]

    return accumulated


def _wrong_merge(mistake: Mistake[Any], exercise: Exercise) -> Call:
    def merged(weight: Array, lora_A: Array, lora_B: Array, scaling: float) -> Array:
        wrong = mistake.wrong(lambda weight, adapter, name: exercise.reference(weight, lora_A, lora_B, scaling))
        return wrong(weight, SimpleNamespace(scaling=lambda name: scaling), "")

    return merged


def _wrong_alpha(mistake: Mistake[Any], exercise: Exercise) -> Call:
    def gguf_alpha(lora_alpha: float, scalings: Array, ranks: Array) -> float:
        adapter = SimpleNamespace(config=SimpleNamespace(lora_alpha=lora_alpha))
        return mistake.wrong(lambda adapter: exercise.reference(lora_alpha, scalings, ranks))(adapter)

    return gguf_alpha


ADAMW, LORA = "llorch.training.adamw.", "llorch.ops.lora."
TRAINING_ADAPTERS: Mapping[str, Mapping[str, TrainingAdapter]] = {  # exercise -> wrapped function -> adapter
    "lora_scaling": {"llorch.lora.config.LoraConfig.scaling_of": _wrong_scaling},
    "masked_labels": {"llorch.training.batch.Batch.each_document": _wrong_labels},
    "lora_backward": {LORA + "lora_backward": _add_frozen, LORA + "LoraMatrix.backward": _wrong_lora_backward},
    "residual_backward": {"llorch.model.backward.block_backward": _wrong_residual},
    "clip_by_norm": {ADAMW + "clip_by_norm": _wrong_clip},
    "adamw_step": {
        ADAMW + "adamw_step": lambda mistake, exercise: _with_betas(mistake.wrong(our_adamw_step)),
        ADAMW + "moved": _wrong_step_part,
        ADAMW + "moments": _wrong_step_part,
    },
    "learning_rate": {ADAMW + "learning_rate": lambda mistake, exercise: mistake.wrong(exercise.reference)},
    "accumulated": {"llorch.training.numpy_step.loss_and_gradients": _wrong_accumulation},
    "merged": {"llorch.lora.merge.merged_matrix": _wrong_merge},
    "gguf_alpha": {"llorch.lora.gguf_format.common_alpha": _wrong_alpha},
}
