"""Leaves in C for the torch path on the CPU."""
