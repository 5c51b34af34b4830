"""What an adapter starts from, by PEFT's rules, drawn apart for every tensor: a seed gives the same numbers anywhere.

    default    A uniform within 1 / sqrt(in), B zero            gaussian   A normal with deviation 1 / r, B zero
    pissa      scaling * B A is the largest part of W: its first r singular vectors, their values shared by both sides
    embedding  A zero, B standard normal, whichever of these is asked for

With B or A zero the model starts as its base. With PiSSA it does so over the rest of W only. Here the base is never
changed: while training, what the adapter started as is taken off again (`attach(..., minus=)`), and `over_original`
turns both into one plain adapter of twice the rank, which is right beside the base as published.

Source: peft/tuners/lora/layer.py (`reset_lora_parameters`, `pissa_init`) and model.py (`subtract_mutated_init`);
PiSSA arXiv:2404.02948.
"""

import hashlib
import math
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Float32

from llorch.families.config import ModelConfig
from llorch.files import Weights
from llorch.lora.adapter import LORA_A, LORA_B, Adapter, LoraTensors, checked
from llorch.lora.config import LoraConfig
from llorch.lora.merge import output_lengths
from llorch.lora.targets import LoraTarget
from llorch.runtime.errors import UserError

INITS = ("default", "gaussian", "pissa")


def initial_adapter(config: LoraConfig, weights: Weights, *, init: str, seed: int) -> Adapter:
    """Draw what training starts from; one of PiSSA is meant with `attach(..., minus=)`.

    The base's matrices are read for PiSSA and DoRA only. ValueError: an unknown rule, a seed below 0, PiSSA with DoRA,
    a rank that a matrix does not have, or a part of the configuration that fits no matrix.
    """
    if init not in INITS:
        raise UserError(f"lora init: expected one of {', '.join(INITS)}, got {init!r}")
    if seed < 0:
        raise UserError(f"lora init: the seed must be 0 or above, got {seed}")
    if init == "pissa" and config.use_dora:
        raise UserError("lora init: pissa cannot be combined with DoRA; choose one of them")
    config.require_effect(weights.config)
    if init == "pissa" and config.target_parameters:
        raise UserError("lora init: pissa cannot be combined with target_parameters (nor in PEFT); choose default")
    tensors = {}
    for name, target in config.targets(weights.config).items():
        rank, scaling = config.rank_of(target), config.scaling_of(target)
        if init == "pissa" and not target.is_embedding:
            pair = principal(base_matrix(weights, target), rank=rank, scaling=scaling, name=name)
        else:
            pair = _drawn(target, rank, init, seed)
        tensors[name] = LoraTensors(*pair)
        if config.use_dora:
            weight = base_matrix(weights, target)
            lengths = output_lengths(weight, tensors[name], scaling, is_embedding=target.is_embedding)
            tensors[name] = LoraTensors(*pair, lengths.astype(np.float32))
    return checked(config, tensors, weights.config)


def base_matrix(weights: Weights, target: LoraTarget) -> Float[np.ndarray, "rows columns"]:
    """Read the matrix that an adapter changes, in the form that transformers has."""
    if all(part.rows is None for part in target.parts):
        return weights.read(target.weight)
    whole = np.empty((target.n_out, target.n_in), weights.dtype)
    for part in target.parts:
        whole[[*(part.rows or ())]] = weights.read(part.name)
    return whole


def principal(
    weight: Float[np.ndarray, "out in"], *, rank: int, scaling: float, name: str
) -> tuple[Float32[np.ndarray, "r in"], Float32[np.ndarray, "out r"]]:
    """Split off the largest part of a matrix as A and B: scaling * B A is its best approximation of that rank."""
    if rank > min(weight.shape):
        raise UserError(f"lora init: pissa needs a rank of at most {min(weight.shape)} for {name}, got {rank}")
    left, values, right = np.linalg.svd(weight.astype(np.float64), full_matrices=False)
    share = np.sqrt(values[:rank] / scaling)
    return (share[:, None] * right[:rank]).astype(np.float32), (left[:, :rank] * share).astype(np.float32)


def over_original(trained: Adapter, initial: Adapter, model: ModelConfig) -> Adapter:
    """Turn an adapter trained with PiSSA into one of twice the rank, the same scale, beside the original base.

    W - s B0 A0 + s B A = W + s [B, -B0] [A; A0]
    """
    tensors = {}
    for name, after in trained.tensors.items():
        before = initial.tensors[name]
        lora_A = np.concatenate([after.lora_A, before.lora_A])
        tensors[name] = LoraTensors(lora_A, np.concatenate([after.lora_B, -before.lora_B], axis=1))
    return checked(_with_twice_the_rank(trained.config), tensors, model)


def _with_twice_the_rank(config: LoraConfig) -> LoraConfig:
    """Double every rank of a configuration, and increase alpha so that the scaling of the adapter stays."""
    factor = math.sqrt(2) if config.use_rslora else 2.0
    return replace(
        config,
        r=2 * config.r,
        lora_alpha=factor * config.lora_alpha,
        rank_pattern={pattern: 2 * rank for pattern, rank in config.rank_pattern.items()},
        alpha_pattern={pattern: factor * alpha for pattern, alpha in config.alpha_pattern.items()},
    )


def _drawn(target: LoraTarget, rank: int, init: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw the factors, one of which is zero: lora_A for an embedding, else lora_B."""
    lora_A, lora_B = np.zeros(target.shape_A(rank), np.float32), np.zeros(target.shape_B(rank), np.float32)
    if target.is_embedding:
        lora_B = _generator(seed, f"{target.name}.{LORA_B}").standard_normal(lora_B.shape)
    elif init == "gaussian":
        lora_A = _generator(seed, f"{target.name}.{LORA_A}").standard_normal(lora_A.shape) / rank
    else:
        bound = 1 / math.sqrt(lora_A.shape[1])
        lora_A = _generator(seed, f"{target.name}.{LORA_A}").uniform(-bound, bound, lora_A.shape)
    return lora_A.astype(np.float32), lora_B.astype(np.float32)


def _generator(seed: int, name: str) -> np.random.Generator:
    """Make the random generator of one tensor, so that its numbers do not depend on other tensors."""
    digest = hashlib.sha256(name.encode()).digest()
    return np.random.Generator(np.random.PCG64([seed, *np.frombuffer(digest, np.uint32).tolist()]))
