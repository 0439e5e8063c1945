"""Layer, RMS, group, instance and batch norms; importing the package registers their primitives."""

from primitives.ops.norms import batch_norm_relu_eval as batch_norm_relu_eval
from primitives.ops.norms import group_norm_silu as group_norm_silu
