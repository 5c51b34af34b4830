"""Quantised Hugging Face folders: one reader per method.

    codes                bits to numbers: packed integers, E2M1, E4M3, E8M0
    matrix               a stored matrix, in one form for all formats
    fields               a stored matrix as codes, scales and offsets that kernels multiply
    source               settings and tensors of a folder, for the readers
    gptq, float8, ...    the readers
    activations          rounding of activations, for scheme numerics
    folder               the folder with matrices in place of their tensors

Other packages see a folder of matrices: `model.layers.0.self_attn.q_proj.weight` is one matrix, stored in one or more
tensors.
"""

from llorch.files.quantised.folder import SETTINGS, QuantisedFolder, is_quantised

__all__ = ["SETTINGS", "QuantisedFolder", "is_quantised"]
