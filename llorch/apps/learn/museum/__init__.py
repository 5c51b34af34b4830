"""The bug museum: reports about wrong engines, as exercises. The learner gets a dump and names the cause.

`reports.toml` holds the reports, by thread. `exhibit` reads it, injects the cause into llorch's forward pass of a
built-in model and writes the dump of that run. `answers` judges a learner's answer.
"""
