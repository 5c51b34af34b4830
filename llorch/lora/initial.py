"""Initial values of an adapter by PEFT's rules, with one generator per tensor: a seed gives equal values anywhere.

    default    A uniform in +-1 / sqrt(in), B zero            gaussian   A normal with deviation 1 / r, B zero
    pissa      scaling * B A is the best rank-r approximation of W, with the singular values split between A and B
    embedding  A zero, B standard normal, for all three rules

With B or A zero the model starts equal to its base. PiSSA's B A must be subtracted from W first. llorch never changes
the base: training subtracts the initial adapter in each forward (`attach(..., minus=)` of `pytorch.lora`), and
`pissa_to_lora` combines both into one adapter of twice the rank for the published base.

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
from llorch.lora.merge import output_norms
from llorch.lora.targets import LoraTarget
from llorch.runtime.errors import UserError

INITS = ("default", "gaussian", "pissa")


def initial_adapter(config: LoraConfig, weights: Weights, *, init: str, seed: int) -> Adapter:
    """Draw the initial adapter of a training by the rule `init`, one of `INITS`.

    The base's matrices are read for PiSSA and DoRA only. UserError: an unknown rule, a seed below 0, PiSSA with DoRA,
    a rank above the size of a matrix, or an entry of the configuration that matches no matrix.
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
            pair = _draw_pair(target, rank, init, seed)
        tensors[name] = LoraTensors(*pair)
        if config.use_dora:
            weight = base_matrix(weights, target)
            norms = output_norms(weight, tensors[name], scaling, is_embedding=target.is_embedding)
            tensors[name] = LoraTensors(*pair, norms.astype(np.float32))
    return checked(config, tensors, weights.config)


def base_matrix(weights: Weights, target: LoraTarget) -> Float[np.ndarray, "rows columns"]:
    """Read the matrix that an adapter changes, with the parts of a fused matrix in transformers' row order."""
    if all(part.rows is None for part in target.parts):
        return weights.read(target.weight)
    fused_matrix = np.empty((target.n_out, target.n_in), weights.dtype)
    for part in target.parts:
        fused_matrix[[*(part.rows or ())]] = weights.read(part.name)
    return fused_matrix


def principal(
    weight: Float[np.ndarray, "out in"], *, rank: int, scaling: float, name: str
) -> tuple[Float32[np.ndarray, "r in"], Float32[np.ndarray, "out r"]]:
    """Compute A and B such that scaling * B A is the best approximation of a matrix with this rank, by SVD."""
    if rank > min(weight.shape):
        raise UserError(f"lora init: pissa needs a rank of at most {min(weight.shape)} for {name}, got {rank}")
    u, values, v = np.linalg.svd(weight.astype(np.float64), full_matrices=False)
    root_values = np.sqrt(values[:rank] / scaling)
    return (root_values[:, None] * v[:rank]).astype(np.float32), (u[:, :rank] * root_values).astype(np.float32)


def pissa_to_lora(trained: Adapter, initial: Adapter, model: ModelConfig) -> Adapter:
    """Convert an adapter trained with PiSSA into one of twice the rank and equal scaling for the original base.

    W - s B0 A0 + s B A = W + s [B, -B0] [A; A0]
    """
    tensors = {}
    for name, trained_pair in trained.tensors.items():
        initial_pair = initial.tensors[name]
        lora_A = np.concatenate([trained_pair.lora_A, initial_pair.lora_A])
        tensors[name] = LoraTensors(lora_A, np.concatenate([trained_pair.lora_B, -initial_pair.lora_B], axis=1))
    return checked(_with_twice_the_rank(trained.config), tensors, model)


def _with_twice_the_rank(config: LoraConfig) -> LoraConfig:
    """Double every rank of a configuration, and increase alpha so that the scaling stays."""
    factor = math.sqrt(2) if config.use_rslora else 2.0
    return replace(
        config,
        r=2 * config.r,
        lora_alpha=factor * config.lora_alpha,
        rank_pattern={pattern: 2 * rank for pattern, rank in config.rank_pattern.items()},
        alpha_pattern={pattern: factor * alpha for pattern, alpha in config.alpha_pattern.items()},
    )


def _draw_pair(target: LoraTarget, rank: int, init: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw both factors; one is zero: lora_A for an embedding, else lora_B."""
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
