"""Hypotheses of a diagnosis, and the trials that plant them."""
