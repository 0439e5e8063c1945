"""Batch norm over channels, with statistics of the batch or running ones, and ReLU after it."""
