"""Triton kernels for CUDA and AMD devices. Importing this package imports no triton; its modules do."""
