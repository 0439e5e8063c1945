"""Layer, RMS, group, instance and batch norms; importing the package registers their primitives."""

from primitives.ops.norms import batch_norm_relu as batch_norm_relu
from primitives.ops.norms import group_norm_silu as group_norm_silu
