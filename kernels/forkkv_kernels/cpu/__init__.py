"""Kernels for CPUs, compiled by Numba when first used and then kept on disk."""
