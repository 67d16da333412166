"""Kernels that torch has none of: the optimizer's pass on the host (C++) and on CUDA (Triton)."""
