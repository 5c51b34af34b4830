"""Matrices of files that NumPy multiplies in C without decoding them: see `llorch.ops.compiled.products`."""

from llorch.files.mapped import release_pages
from llorch.files.packed import Packed
from llorch.files.quantised.fields import code_table, group_order, has_finite_numbers, pack_table, shared_by_rows
from llorch.files.quantised.matrix import QuantisedMatrix
from llorch.ops.compiled.library import library
from llorch.ops.compiled.products import CompiledMatrix


def compiled_matrix(packed: Packed) -> CompiledMatrix | None:
    """Repack a matrix for its product in C; None without a C compiler, for other types, and for NaN or infinity.

    The fields are copies, except codes of eight bits that the file has row by row.
    """
    if not isinstance(packed, QuantisedMatrix) or (table := code_table(packed)) is None or library() is None:
        return None
    fields = pack_table(packed, table)
    for part in packed.parts.values():
        release_pages(part.raw)
    if not has_finite_numbers(fields, table):
        return None
    codes, more = fields["codes"], fields.get("zero", fields.get("minimum"))
    shape, shared, order = (packed.shape[0], packed.shape[1]), shared_by_rows(table, fields), group_order(packed)
    return CompiledMatrix(table.name, shape, codes, fields["d"], shared, more, order)
