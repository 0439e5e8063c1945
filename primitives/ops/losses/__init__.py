"""Cross entropy, of logits and of a linear layer; importing the package registers their primitives."""

from primitives.ops.losses import linear_cross_entropy as linear_cross_entropy
