"""Facts and rules of each model family, one file for each, and the readers of hyperparameters.

`config` has the hyperparameters that llorch uses, `family` is the record of a family, and `table` lists the families.
"""
