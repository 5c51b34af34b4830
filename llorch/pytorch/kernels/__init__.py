"""Kernels that replace modules of the reference implementation: C for the CPU, Triton for CUDA, and their checks."""
