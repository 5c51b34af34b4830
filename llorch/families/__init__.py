"""Facts and rules of each model family, one file each, and the readers of hyperparameters.

`config` is what the rest of llorch reads, `family` the record of a family, `table` lists the families.
"""
