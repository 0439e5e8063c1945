"""The ops: one record a file, from which tests, measurements and the table of machine code take what they need."""

from perf.ops.add_layer_norm import ADD_LAYER_NORM, ADD_RMS_NORM
from perf.ops.attention import ATTENTION
from perf.ops.batch_norm import BATCH_NORM, BATCH_NORM_EVAL
from perf.ops.batch_norm_relu import BATCH_NORM_RELU, BATCH_NORM_RELU_EVAL
from perf.ops.cross_entropy import CROSS_ENTROPY, SOFT_CROSS_ENTROPY
from perf.ops.dropout import DROPOUT
from perf.ops.group_norm import GROUP_NORM, GROUP_NORM_SILU
from perf.ops.instance_norm import INSTANCE_NORM
from perf.ops.layer_norm import LAYER_NORM
from perf.ops.log_softmax import LOG_SOFTMAX
from perf.ops.rms_norm import RMS_NORM
from perf.ops.softmax import SOFTMAX

CASES = (
    *(LAYER_NORM, RMS_NORM, GROUP_NORM, GROUP_NORM_SILU, LOG_SOFTMAX, SOFTMAX, CROSS_ENTROPY, SOFT_CROSS_ENTROPY),
    *(BATCH_NORM, BATCH_NORM_EVAL, INSTANCE_NORM, BATCH_NORM_RELU, BATCH_NORM_RELU_EVAL, DROPOUT),
    *(ADD_LAYER_NORM, ADD_RMS_NORM, ATTENTION),
)
# One for all ops that call the same primitives.
FAMILIES = tuple(case for case in CASES if not case.family)
