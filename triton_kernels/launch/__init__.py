"""The launch planner: every block size, number of warps, stage and split in this package is decided here.

A plan is a frozen dataclass; the function that fills it states the reason for each number next to it. Numbers of
columns (a model constant) may be compile-time constants of a kernel; numbers of rows never are, so that a new batch
size compiles nothing.
"""

from triton_kernels.launch._arithmetic import ACCESS_BYTES, MIN_MATMUL, block_row_splits, cdiv, next_power_of_2
from triton_kernels.launch._row_plan import RowPlan, SumPlan, row_options
from triton_kernels.launch.attention import AttentionPlan, plan_attention
from triton_kernels.launch.channels import (
    ChannelMergePlan,
    ChannelPlan,
    plan_channel_merge,
    plan_channel_sums,
    plan_channel_transform,
)
from triton_kernels.launch.chips import CHIPS, Chip, chip_from_properties, chip_of, device_name, use_chip
from triton_kernels.launch.dropout import DropoutPlan, plan_dropout, plan_philox
from triton_kernels.launch.layer_norm import (
    LAYER_NORM_MAX_SEGMENTS,
    ParamReducePlan,
    plan_layer_norm_params,
    plan_layer_norm_rows,
    plan_param_reduce,
)
from triton_kernels.launch.layer_norm_second_order import plan_layer_norm_second_rows, plan_layer_norm_second_sums
from triton_kernels.launch.log_softmax import plan_log_softmax
from triton_kernels.launch.tables import LIMITS, Limits, limits_of, use_limits
