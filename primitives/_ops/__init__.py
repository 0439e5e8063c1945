"""One family of primitives a file, with every rule of it: math, schema, reference, kernel, vjp, jvp, vmap.

The rules of second order lie in a file of their own beside it, and importing the package registers all of them.
"""

from primitives._ops import attention_second_order as attention_second_order
from primitives._ops import batch_norm_relu_eval as batch_norm_relu_eval
from primitives._ops import batch_norm_second_order as batch_norm_second_order
from primitives._ops import cross_entropy_second_order as cross_entropy_second_order
from primitives._ops import dropout as dropout
from primitives._ops import group_norm_silu as group_norm_silu
from primitives._ops import layer_norm_second_order as layer_norm_second_order
from primitives._ops import linear_cross_entropy as linear_cross_entropy
from primitives._ops import log_softmax as log_softmax
from primitives._ops import philox as philox
from primitives._ops import softmax as softmax
