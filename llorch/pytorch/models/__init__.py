"""Torch modules of blocks that are not dense: delta nets, experts, windows."""
