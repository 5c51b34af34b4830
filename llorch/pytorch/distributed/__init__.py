"""Distributed training and generation: one model on the ranks of a device mesh."""
