"""Pytrees: laid over one another, taken apart into tensors, mapped leaf by leaf, and interned by structure."""
