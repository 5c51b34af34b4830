"""Leaves of the torch model that are faster than the plain ones, each tested against its plain twin."""
