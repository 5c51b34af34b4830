"""Expectations of a model, made from goldens alone, and the rows that a runner gets for them."""
