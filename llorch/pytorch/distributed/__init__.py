"""One model on the ranks of a device mesh."""
