"""All clients of a cohort at once: stacks, the programs that move them, and their kernels."""
