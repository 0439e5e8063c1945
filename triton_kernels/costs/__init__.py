"""What each launcher costs: bytes of the op, bytes that the plan in force moves, launches.

    cost = costs.layer_norm_bwd(y_bar, x, weight, mean, rstd, 1, 0, (True, True, True))
    cost.minimum_bytes, cost.bytes_moved, cost.launches

There is one function per launcher, of its name and with its arguments, which may be meta tensors: only shapes, strides,
dtypes and what is None or not wanted are looked at. The plan is the one that the launcher would take on the device of
`x`, or on the chip that `launch.use_chip` sets. The byte gate holds the kernels to these figures, the time model
predicts from them, and the benchmarks take their bytes from here, so that no two of the three can disagree.

Inputs are taken to need no copy: what a launcher copies because no view fits its strides is not counted.
"""

from triton_kernels.costs._cost import Cost
from triton_kernels.costs.attention import attention_bwd, attention_fwd, attention_jvp, attention_pairing
from triton_kernels.costs.batch_norm import (
    batch_norm_bwd_jvp,
    batch_norm_eval_bwd,
    batch_norm_eval_fwd,
    batch_norm_eval_jvp,
    batch_norm_pairing,
    batch_norm_train_bwd,
    batch_norm_train_fwd,
    batch_norm_train_fwd_jvp,
    batch_norm_train_jvp,
)
from triton_kernels.costs.dropout import dropout_fwd, philox_words
from triton_kernels.costs.layer_norm import layer_norm_bwd, layer_norm_fwd, layer_norm_jvp
from triton_kernels.costs.layer_norm_second_order import layer_norm_bwd_jvp, layer_norm_pairing
from triton_kernels.costs.log_softmax import (
    log_softmax_bwd,
    log_softmax_bwd_jvp,
    log_softmax_fwd,
    log_softmax_jvp,
    log_softmax_pairing,
)

__all__ = [
    "Cost",
    "attention_bwd",
    "attention_fwd",
    "attention_jvp",
    "attention_pairing",
    "batch_norm_bwd_jvp",
    "batch_norm_eval_bwd",
    "batch_norm_eval_fwd",
    "batch_norm_eval_jvp",
    "batch_norm_pairing",
    "batch_norm_train_bwd",
    "batch_norm_train_fwd",
    "batch_norm_train_fwd_jvp",
    "batch_norm_train_jvp",
    "dropout_fwd",
    "layer_norm_bwd",
    "layer_norm_bwd_jvp",
    "layer_norm_fwd",
    "layer_norm_jvp",
    "layer_norm_pairing",
    "log_softmax_bwd",
    "log_softmax_bwd_jvp",
    "log_softmax_fwd",
    "log_softmax_jvp",
    "log_softmax_pairing",
    "philox_words",
]
