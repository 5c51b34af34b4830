"""Tolerances of the forward pass, derived from goldens and the float64 reference."""
