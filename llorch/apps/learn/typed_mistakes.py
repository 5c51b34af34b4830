"""Functions that contain a known mistake, as a learner types them: made from rows of `llorch.diagnosis.mistakes`.

A row that replaces a function of a lesson takes the arguments of that function. This module adapts the other rows.
Rows of training replace functions of llorch: each is put around that function, and called as the lesson's function is.
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
from llorch.diagnosis.mistakes.planting import instead, owner_of, replaced, replaced_all
from llorch.files.quant import GGMLType
from llorch.lora.config import LoraConfig
from llorch.lora.targets import LoraTarget
from llorch.ops.linear import linear_backward

RIGHT_DECODERS = {GGMLType.Q8_0: our_q8_0, GGMLType.Q4_0: our_q4_0}
FLOATS = (np.float32, np.float64)
BLOCK = 32  # values in a block of Q8_0 or Q4_0
Tensor = Any  # of torch, which only lesson 14 imports
Typed = Callable[[Exercise], Mapping[str, Call]]  # of an exercise: the name of each mistake, and the function


def make_typed_mistakes(exercise: Exercise) -> Mapping[str, Call]:
    """Make the wrong functions of an exercise, by the names of the mistakes, in the order of the library."""
    return {name: _in_dtype(function) for name, function in SPECIAL.get(exercise.name, _replaced)(exercise).items()}


def _replaced(exercise: Exercise) -> Mapping[str, Call]:
    """Return an exercise's reference with each known mistake, by the mistake's name."""
    return {
        **{mistake.name: mistake.wrong(exercise.reference) for mistake in _mistakes_of(exercise.name)},
        **typed_in_training(exercise),
    }


def _mistakes_of(name: str) -> list[Mistake[Any]]:
    return [mistake for mistake in MISTAKES.values() if mistake.part == name]


def _in_dtype(function: Call) -> Call:
    """Round results that are wider than every array, as a lesson asks for: some rows compute in float64."""

    @wraps(function)
    def wrong(*given: Any, **named: Any) -> Any:
        dtypes = [each.dtype for each in (*given, *named.values()) if getattr(each, "dtype", None) in FLOATS]
        returned = function(*given, **named)
        if isinstance(returned, tuple):
            return tuple(_as(each, dtypes) for each in returned)
        return _as(returned, dtypes)

    return wrong


def _as(result: Any, dtypes: Sequence[np.dtype]) -> Any:
    """Round a float array to the first of the dtypes, unless it has one of them."""
    is_other = isinstance(result, np.ndarray) and result.dtype in FLOATS and result.dtype not in dtypes
    return result.astype(dtypes[0]) if is_other and dtypes else result


def _both_caches(exercise: Exercise) -> Mapping[str, Call]:
    """Do to keys and values alike what a row does to the rows of one cache."""

    def of_both(one: Call) -> Call:
        def append(past_k: np.ndarray, past_v: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
            new_k, new_v = k.swapaxes(0, 1), v.swapaxes(0, 1)
            return one(past=past_k, new=new_k), one(past=past_v, new=new_v)

        return append

    def right(past: np.ndarray, new: np.ndarray) -> np.ndarray:
        return np.concatenate([past, new], axis=1)

    return {mistake.name: of_both(mistake.wrong(right)) for mistake in _mistakes_of(exercise.name)}


def _decoders(exercise: Exercise) -> Mapping[str, Call]:
    """Decode blocks of one type as each mistake of that type does."""
    kind = GGMLType[exercise.name.upper()]

    def decoder(mistake: Mistake[QuantisedInputs]) -> Call:
        def wrong(blocks: np.ndarray) -> np.ndarray:
            shape, no_inputs = (len(blocks), BLOCK), np.empty((0, 0), np.float32)
            with replaced(exercise.replaces, instead(RIGHT_DECODERS[kind])):  # where this function stands itself
                return mistake.result(QuantisedInputs(kind, blocks, shape, no_inputs), "decode").reshape(shape)

        return wrong

    able = (mistake for mistake in QUANTISED if "decode" in mistake.stages and kind.name in mistake.cases)
    return {mistake.name: decoder(mistake) for mistake in able}


def _outputs_of_attention(exercise: Exercise) -> Mapping[str, Call]:
    def of_output(linear: Call) -> Call:
        def attention_output(context: np.ndarray, o_proj: np.ndarray, o_bias: np.ndarray | None) -> np.ndarray:
            return linear(x=context, weight=o_proj, bias=o_bias)

        return attention_output

    return _of_products("attn_out", of_output)


def _feed_forwards(exercise: Exercise) -> Mapping[str, Call]:
    """Get the last product wrong, or the whole."""

    def of_down(linear: Call) -> Call:
        def feed_forward(
            h: np.ndarray, gate_proj: np.ndarray, up_proj: np.ndarray, down_proj: np.ndarray
        ) -> np.ndarray:
            act = SWIGLU.reference(gate=our_linear(h, gate_proj), up=our_linear(h, up_proj))
            return linear(x=act, weight=down_proj, bias=None)

        return feed_forward

    return {**_replaced(exercise), **_of_products("ffn_out", of_down)}


def _logits_mistakes(exercise: Exercise) -> Mapping[str, Call]:
    """Get the product wrong, or what is done to the logits."""

    def of_output(linear: Call) -> Call:
        def logits(
            x: np.ndarray, final_norm: np.ndarray, lm_head: np.ndarray | None, embed_tokens: np.ndarray, eps: float
        ) -> np.ndarray:
            normed = RMS_NORM.reference(x=x, weight=final_norm, eps=eps)
            return linear(x=normed, weight=embed_tokens if lm_head is None else lm_head, bias=None)

        return logits

    return {**_replaced(exercise), **_of_products("logits", of_output)}


def _of_products(stage: str, brought: Callable[[Call], Call]) -> Mapping[str, Call]:
    """Put the wrong products that a stage can have into a function around them."""
    mistakes = (mistake for mistake in _mistakes_of("linear") if stage in mistake.stages)
    return {mistake.name: brought(mistake.wrong(LINEAR.reference)) for mistake in mistakes}


def _norms_of_tensors(exercise: Exercise) -> Mapping[str, Call]:
    """Normalise tensors as the wrong norms of lesson 01 normalise arrays."""

    def of_tensors(function: Call) -> Call:
        def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            return _like(x, function(x=_array(x), weight=_array(weight), eps=eps))

        return rms_norm

    return {name: of_tensors(function) for name, function in make_typed_mistakes(RMS_NORM).items()}


def _turns_of_tensors(exercise: Exercise) -> Mapping[str, Call]:
    """Rotate tensors as the wrong rotations of lesson 01b rotate arrays, one row of the batch after the other."""

    def of_tensors(function: Call) -> Call:
        def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            tables = (np.broadcast_to(_array(table, np.float64), (len(x), *table.shape[1:])) for table in (cos, sin))
            rows = [function(x=row, cos=c, sin=s) for row, c, s in zip(_array(x), *tables, strict=True)]
            return _like(x, np.stack(rows))

        return rope

    return {name: of_tensors(function) for name, function in make_typed_mistakes(ROPE).items()}


def _array(tensor: Tensor, dtype: type[np.floating] = np.float32) -> np.ndarray:
    return tensor.detach().float().cpu().numpy().astype(dtype, copy=False)


def _like(x: Tensor, array: np.ndarray) -> Tensor:
    """Return the array as a tensor with the dtype and the device of `x`."""
    return x.new_tensor(array, dtype=x.dtype)


SPECIAL: Mapping[str, Typed] = {
    "append": _both_caches,
    "attention_output": _outputs_of_attention,
    "feed_forward": _feed_forwards,
    "logits": _logits_mistakes,
    "q8_0": _decoders,
    "q4_0": _decoders,
    "torch_rms_norm": _norms_of_tensors,
    "torch_rope": _turns_of_tensors,
}


Array = np.ndarray
Brought = Callable[[Mistake[Any], Exercise], Call]  # a row and an exercise: the function that a learner types


def typed_in_training(exercise: Exercise) -> Mapping[str, Call]:
    """Make the wrong functions of an exercise of training, by the names of the mistakes."""
    replaced_by = BROUGHT.get(exercise.name, {exercise.replaces: _called_alike})
    return {
        mistake.name: replaced_by[mistake.part](mistake, exercise)
        for mistake in TRAINING
        if mistake.part in replaced_by
    }


def _called_alike(mistake: Mistake[Any], exercise: Exercise) -> Call:
    """Call the wrong function as llorch calls the right one: arrays by position, settings by name."""
    wrong, names = mistake.wrong(exercise.reference), inspect.signature(exercise.reference)

    def typed(*given: object, **named: object) -> Any:
        arguments = names.bind(*given, **named).arguments
        arrays = [value for value in arguments.values() if isinstance(value, Array)]
        settings = {name: value for name, value in arguments.items() if not isinstance(value, Array)}
        return wrong(*arrays, **settings)

    return typed


def _wrong_scaling(mistake: Mistake[Any], exercise: Exercise) -> Call:
    """Make a configuration of the settings, in which one matrix may have its own rank and alpha."""

    def right(config: LoraConfig, target: LoraTarget) -> float:
        own = {"own_r": config.rank_of(target), "own_alpha": config.alpha_of(target)}
        return exercise.reference(r=config.r, lora_alpha=config.lora_alpha, use_rslora=config.use_rslora, **own)

    def lora_scaling(r: int, lora_alpha: float, own_r: int | None, own_alpha: float | None, use_rslora: bool) -> float:
        config = LoraConfig(
            r=r, lora_alpha=lora_alpha, use_rslora=use_rslora, rank_pattern={} if own_r is None else {"own": own_r},
            alpha_pattern={} if own_alpha is None else {"own": own_alpha},
        )  # fmt: skip
        return mistake.wrong(right)(config, SimpleNamespace(path="own"))

    return lora_scaling


def _labels(mistake: Mistake[Any], exercise: Exercise) -> Call:
    def masked_labels(ids: Array, learned: Array) -> Array:
        documents = mistake.wrong(lambda batch: [(ids, exercise.reference(ids=ids, learned=learned))])
        return next(iter(documents(None)))[1]

    return masked_labels


def _beside_matrix(mistake: Mistake[Any], exercise: Exercise) -> Call:
    """Send the gradient through the frozen matrix as well, which the row is not about."""

    def lora_backward(
        grad: Array, x: Array, weight: Array, lora_A: Array, lora_B: Array, scaling: float
    ) -> tuple[Array, Array, Array]:
        d_x, d_A, d_B = mistake.wrong(our_lora_backward)(grad, x, lora_A, lora_B, scaling=scaling)
        return linear_backward(grad, weight) + d_x, d_A, d_B

    return lora_backward


def _wrong_lora_backward(mistake: Mistake[Any], exercise: Exercise) -> Call:
    """Make the backward pass of a LoRA matrix that has a mistake, with the parameters of the exercise."""

    def lora_backward(
        grad: Array, x: Array, weight: Array, lora_A: Array, lora_B: Array, scaling: float
    ) -> tuple[Array, Array, Array]:
        def right(matrix: object, grad: Array, x: Array) -> tuple[Array, dict[str, Array]]:
            d_x, d_A, d_B = exercise.reference(grad, x, weight, lora_A, lora_B, scaling)
            return d_x, {"lora_A": d_A, "lora_B": d_B}

        d_x, trained = mistake.wrong(right)(SimpleNamespace(base=weight), grad, x)
        return d_x, trained["lora_A"], trained["lora_B"]

    return lora_backward


def _residual(mistake: Mistake[Any], exercise: Exercise) -> Call:
    def residual_backward(grad: Array, through: Array) -> Array:
        return mistake.wrong(lambda d_out: exercise.reference(grad=d_out, through=through))(grad)

    return residual_backward


def _clip(mistake: Mistake[Any], exercise: Exercise) -> Call:
    wrong = mistake.wrong(our_clip_by_norm)

    def clip_by_norm(grads: Mapping[str, Array], max_norm: float) -> tuple[Array, float]:
        clipped, norm = wrong(grads, max_norm=max_norm)
        return in_one_row(clipped), norm

    return clip_by_norm


def _inside_step(mistake: Mistake[Any], exercise: Exercise) -> Call:
    """Put a wrong function into llorch's step, with the wrong function that belongs to it."""
    changes = mistake.changes(along=True)
    replacements = [(part, instead(wrong(getattr(*owner_of(part))))) for part, wrong in changes]  # once: some count

    def step(*arrays: Array, **how: object) -> tuple[Array, ...]:
        with replaced_all(replacements):
            return our_adamw_step(*arrays, **how)

    return _with_betas(step)


def _with_betas(wrong: Call) -> Call:
    def adamw_step(
        param: Array, grad: Array, m: Array, v: Array, step: int, lr: float, beta1: float, beta2: float, eps: float,
        weight_decay: float,
    ) -> tuple[Array, ...]:  # fmt: skip
        how = {"step": step, "lr": lr, "eps": eps, "weight_decay": weight_decay}
        return wrong(param, grad, m, v, betas=(beta1, beta2), **how)

    return adamw_step


def _accumulated(mistake: Mistake[Any], exercise: Exercise) -> Call:
    """Take the sums of each micro-batch for the batches of a step."""

    def accumulated(loss_sums: Array, n_trained: Array, grad_sums: Array) -> tuple[float, Array]:
        def right(weights: None, adapter: None, batches: list[int], **how: object) -> tuple[float, dict[str, Array]]:
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


def _alpha(mistake: Mistake[Any], exercise: Exercise) -> Call:
    def gguf_alpha(lora_alpha: float, scalings: Array, ranks: Array) -> float:
        adapter = SimpleNamespace(config=SimpleNamespace(lora_alpha=lora_alpha))
        return mistake.wrong(lambda adapter: exercise.reference(lora_alpha, scalings, ranks))(adapter)

    return gguf_alpha


ADAMW, LORA = "llorch.training.adamw.", "llorch.ops.lora."
BROUGHT: Mapping[str, Mapping[str, Brought]] = {  # exercise -> function of llorch that a row replaces -> how
    "lora_scaling": {"llorch.lora.config.LoraConfig.scaling_of": _wrong_scaling},
    "masked_labels": {"llorch.training.batch.Batch.each_document": _labels},
    "lora_backward": {LORA + "lora_backward": _beside_matrix, LORA + "LoraMatrix.backward": _wrong_lora_backward},
    "residual_backward": {"llorch.model.backward.block_backward": _residual},
    "clip_by_norm": {ADAMW + "clip_by_norm": _clip},
    "adamw_step": {
        ADAMW + "adamw_step": lambda mistake, exercise: _with_betas(mistake.wrong(our_adamw_step)),
        ADAMW + "moved": _inside_step,
        ADAMW + "moments": _inside_step,
    },
    "learning_rate": {ADAMW + "learning_rate": lambda mistake, exercise: mistake.wrong(exercise.reference)},
    "accumulated": {"llorch.training.numpy_step.loss_and_gradients": _accumulated},
    "merged": {"llorch.lora.merge.merged_matrix": _wrong_merge},
    "gguf_alpha": {"llorch.lora.gguf_format.common_alpha": _alpha},
}
