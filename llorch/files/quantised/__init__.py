"""Quantised Hugging Face folders: one reader for each method, and the matrices that they find.

    codes                bits to numbers: packed integers, E2M1, E4M3, E8M0
    matrix               a matrix as its folder stores it; all formats have one form
    source               settings and tensors of a folder, as a reader looks at them
    gptq, float8, ...    the readers
    activations          how a folder rounds activations, for scheme numerics
    folder               the folder with its matrices in place of their tensors

The rest of llorch sees a folder of matrices: `model.layers.0.self_attn.q_proj.weight` is one, however many tensors it
is made of.
"""

from llorch.files.quantised.folder import SETTINGS, QuantisedFolder, is_quantised

__all__ = ["SETTINGS", "QuantisedFolder", "is_quantised"]
