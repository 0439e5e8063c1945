"""Execution of the PTX that Triton compiles, on NumPy arrays with one element per thread: no GPU is needed.

`code` parses, `arithmetic` and `products` have the instructions that compute, `memory` and `shared` those that load and
store with what is wrong about it, `machine` runs a grid, `launching` compiles launches and runs them.
"""
