"""Operators over a stack of clients, each with its own weights: Triton kernels, and the reference they equal."""
