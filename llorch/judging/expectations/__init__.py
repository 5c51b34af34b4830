"""Expectations of a model, derived from goldens only, and their comparisons with a runner."""
