"""The launches of layer norm and batch norm in training in each mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perf.calls import Call, Step
from perf.ops.workload import KERNEL_MODES

# Beside the bench's own modes: the vjp of a jvp, the kernels without parameter sums, the double backward of all
# gradients (a Hessian-vector product in reverse), and all results of the launcher `double_backward`, which derivatives
# of third order take.
NORM_MODES = (*KERNEL_MODES, "backward_of_jvp", "x_only", "gradient_backward", "all_results")

# The requests to the launcher `double_backward` in each mode of the bench, as `(absent tangents, output mask)`. Where
# the loss follows at once, y_bar depends on nothing.
_PARAM_DOTS = ("weight_dot", "bias_dot")
_ALL = (True,) * 6
_OF_BACKWARD = (True, True, True, False, False, False)
_REQUESTS = {
    "double_backward": [(_PARAM_DOTS, _OF_BACKWARD)],
    "gradient_backward": [((), _OF_BACKWARD), ((), (False, *_OF_BACKWARD[1:]))],
    "backward_of_jvp": [((), (False, *_ALL[1:]))],
    "all_results": [((), _ALL)],
}
_RUNNING = ("running_mean", "running_var")


def norm_calls(operands: Any, mode: str, *, is_rows: bool) -> list[Call]:
    """The calls of a mode."""
    has_weight, has_bias = operands.weight is not None, operands.bias is not None
    prefix, first = "" if is_rows else "train_", (True, has_weight, has_bias)
    fwd, fwd_jvp = (
        [(f"{prefix}{name}", absent, None) for absent in ([()] if is_rows else [_RUNNING, ()])]
        for name in ("fwd", "fwd_jvp")
    )
    # Without parameters their cotangents are not wanted.
    results = (True, True, has_weight, True, has_weight, has_bias)
    steps: dict[str, Sequence[Step]] = {
        "forward": fwd,
        "backward": [(f"{prefix}bwd", (), first)],
        # With the value where forward mode is outermost, without it elsewhere.
        "jvp": [*fwd_jvp, (f"{prefix}jvp", (), None)],
        # The loss of the bench is linear in y; of any other, y_bar has a tangent too.
        "hvp": [("bwd_jvp", absent, first) for absent in (("y_bar_dot",), ())],
        "x_only": [
            (f"{prefix}bwd", (), (True, False, False)),
            *[("double_backward", _PARAM_DOTS, (True, True, *(False,) * 4))] * is_rows,
            ("bwd_jvp", ("weight_dot", *["y_bar_dot"] * (not is_rows)), (True, False, False)),
        ],
        **{
            name: [
                ("double_backward", absent, [want and there for want, there in zip(output_mask, results, strict=True)])
                for absent, output_mask in requests
            ]
            for name, requests in _REQUESTS.items()
        },
    }
    return operands.steps(steps[mode])
