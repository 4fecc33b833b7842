"""Stacks of blocks by kernels in C or in bfloat16, with the answers of PyTorch, block by block."""
