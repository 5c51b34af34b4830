"""Lesson 14: parts that are given torch tensors and return such. Nothing is imported before that lesson is checked.

`ours` are the references, `guard` stands around a learner's function, `check` judges the run of our torch modules.
"""
