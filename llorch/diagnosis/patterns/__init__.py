"""Patterns of an error inside one array: the part of the array that is wrong, and what its values are."""

from llorch.diagnosis.patterns.attention import describe_kv_heads, describe_seen_keys, recover_probs
from llorch.diagnosis.patterns.describe import describe_error, describe_mask
from llorch.diagnosis.patterns.non_finite import describe_non_finite
from llorch.diagnosis.patterns.terms import describe_context_terms, describe_product_terms

__all__ = [
    "describe_context_terms", "describe_error", "describe_kv_heads", "describe_mask", "describe_non_finite",
    "describe_product_terms", "describe_seen_keys", "recover_probs",
]  # fmt: skip
