"""Hypotheses of a diagnosis, and the search that injects them."""
