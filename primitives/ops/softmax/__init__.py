"""Softmax and log-softmax; importing the package registers their primitives."""

from primitives.ops.softmax import log_softmax as log_softmax
from primitives.ops.softmax import softmax as softmax
