"""Stored tensors of reference engines, each checked against the hash of the weights that it was made from."""
