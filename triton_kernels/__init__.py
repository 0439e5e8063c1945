"""Fused Triton kernels and their launchers: tensors in, tensors out.

Nothing here knows about autograd, transforms or the `primitives` package above; a launcher views its tensors as rows
or channels, allocates its outputs, asks the planner of its room for a plan, and launches.
"""

__all__ = ["DISTRIBUTION"]

# Another project ships an import package of the same name; `primitives` reads this to tell the two apart.
DISTRIBUTION = "torch-training-primitives"
