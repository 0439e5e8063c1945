"""Kernels over rows: scaffold, sums over rows, views, plans, launches, and maps along one axis."""
