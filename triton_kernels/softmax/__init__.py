"""Softmax and log-softmax."""
