"""Stored matrices as C multiplies them: rows of blocks as in a GGUF file, or the packed codes of a quantised folder."""

from llorch.files.mapped import release_pages
from llorch.files.packed import Packed
from llorch.files.quant import compiled_decoder_is_right
from llorch.files.quantised.fields import code_table, group_order, has_finite_numbers, pack_table, shared_by_rows
from llorch.files.quantised.matrix import QuantisedMatrix
from llorch.ops.compiled.products import KINDS, RUN, CompiledMatrix, is_available


def has_compiled_form(packed: Packed) -> bool:
    """Tell if the C library has functions for the type and the row length of a matrix."""
    if isinstance(packed, QuantisedMatrix):
        return code_table(packed) is not None
    return packed.ggml.name in KINDS and packed.shape[-1] % RUN == 0


def compiled_matrix(packed: Packed) -> CompiledMatrix | None:
    """Return a matrix for the C library; None without the library, for a form that it lacks, and for NaN or infinity.

    The blocks of a GGUF file stay where they are. The fields of a folder's matrix are copies, except codes of eight
    bits that the file has row by row.
    """
    if not is_available():
        return None
    if isinstance(packed, QuantisedMatrix):
        return _from_folder(packed)
    if not has_compiled_form(packed) or not compiled_decoder_is_right(packed.ggml):
        return None
    return CompiledMatrix(packed.ggml.name, packed.shape, packed.by_row)


def _from_folder(packed: QuantisedMatrix) -> CompiledMatrix | None:
    if (table := code_table(packed)) is None:
        return None
    fields = pack_table(packed, table)
    for part in packed.parts.values():
        release_pages(part.raw)
    if not has_finite_numbers(fields, table):
        return None
    codes, more = fields["codes"], fields.get("zero", fields.get("minimum"))
    shape, shared, order = (packed.shape[0], packed.shape[1]), shared_by_rows(table, fields), group_order(packed)
    return CompiledMatrix(table.name, shape, codes, fields["d"], shared, more, order)
