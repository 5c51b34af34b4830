"""Compile every kernel of the dense path for an sm_90 device, which need not be here; for test_fused.

The checks of types are hooked in as under pytest. Prints dtype and name of each kernel, and whether it loads 16 bytes
at a time.
"""

from collections.abc import Iterator
from typing import Any

import triton
from jaxtyping import install_import_hook
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

with install_import_hook(["llorch"], "beartype.beartype"):
    from llorch.pytorch.kernels.triton import decode_attention, dense_matvec, fused, trained

POINTERS = frozenset(
    "x y weight weight0 weight1 weight2 bias0 bias1 bias2 y0 y1 y2 "
    "gate up q k v q_rope k_rope keys values context grad d_x d_gate d_up".split()
)
ONES = {"n_rows": 1, "seq": 1, "kv_heads": 1, "group": 1, "n_parts": 1}  # known to the compiler where they are 1
Case = tuple[str, Any, dict[str, str], dict[str, Any]]


def cases(dtype: str) -> Iterator[Case]:
    """Name, function, types of what is no 32-bit integer, constants; shapes of an 8B model."""
    size = 4 if dtype == "fp32" else 2
    wide, span = {"sums": "*fp32", "ends": "*fp32", "scale": "fp32", "eps": "fp32"}, 16 // size
    for bias in (False, True):
        sizes = {"BIAS": bias, "ROWS": 2, "COLUMNS": 128 * span, "SPAN": span}
        yield f"multiply {bias}", dense_matvec._multiply, {}, sizes
    yield "norm", fused._normalise, wide, {"ROWS": 1, "COLUMNS": 4096}
    yield "norm of heads", fused._normalise, wide, {"ROWS": 16, "COLUMNS": 128}
    yield "swiglu", fused._swiglu, {}, {"TILE": 1024}
    angles = {"slots": "*i64", "cos": "*fp32", "sin": "*fp32"}
    for kept in (False, True):
        sizes = {"KEEP_KEYS": kept, "HALF": 64, "COLUMNS": 64, "HEADS": 32, "KV_HEADS": 8}
        yield f"rotate {kept}", fused._rotate, angles, sizes
    yield "norm back", trained._norm_back, wide, {"ROWS": 1, "COLUMNS": 4096}
    yield "norm of heads back", trained._norm_back, wide, {"ROWS": 16, "COLUMNS": 128}
    yield "swiglu back", trained._swiglu_back, {}, {"TILE": 1024}
    for back in (False, True):
        sizes = {"BACK": back, "HALF": 64, "COLUMNS": 64, "HEADS": 32, "KV_HEADS": 8}
        yield f"turn {back}", trained._rotate_tokens, angles, sizes
    for masked in (False, True):
        sizes = {"MASKED": masked, "WIDEN": False, "BLOCK": 64 // size, "GROUP": 16, "WIDTH": 128}
        yield f"attend {masked}", decode_attention._attend_part, wide | {"seen": "*u8"}, sizes
    yield "combine", decode_attention._combine, wide, {"PARTS": 16, "WIDTH": 128}


def compiled(function: Any, types: dict[str, str], constants: dict[str, Any], dtype: str) -> str:
    """The PTX of a kernel, its pointers and integers divisible by 16."""
    names = [parameter.name for parameter in function.params]
    constants = {name: value for name, value in constants.items() if name in names}
    pointers = {name for name in names if name in POINTERS}
    signature = {name: types.get(name, f"*{dtype}" if name in pointers else "i32") for name in names}
    signature |= {name: "constexpr" for name in constants}
    even = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if signature[name][0] in "*i"}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=values, attrs=even)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


if __name__ == "__main__":
    for kind in ("fp32", "bf16"):
        for name, function, types, constants in cases(kind):
            for ones in ({}, ONES):
                wide = "ld.global.v4" in compiled(function, types, constants | ones, kind)
                print(f"{kind} {name}: {'wide' if wide else 'narrow'}", flush=True)
