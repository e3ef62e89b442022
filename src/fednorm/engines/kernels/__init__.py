"""Operators over a stack of clients, each with weights of its own: Triton kernels, and the reference they must equal."""
