"""Stored tensors of reference engines, each checked against the hash of the weights that produced it."""
