"""Which samples the generic tests run on kernels."""

from __future__ import annotations

from typing import Any

import pytest

from tests.op_cases import CASES
from tests.support import dtype_id


def samples_in_turns(step: int = 1) -> list[Any]:
    """Parameters `case, sample, dtype`, every `step`-th of them.

    The interpreter takes its time: the samples meet the dtypes in turns (out of step with the layouts, of which there
    are four as well), the small one meets all.
    """
    return [
        pytest.param(case, sample, dtype, id=f"{case.name}-{sample}-{dtype_id(dtype)}")
        for case in CASES
        for i, sample in list(enumerate([*case.samples, *[case.small] * len(case.dtypes)]))[::step]
        for dtype in [case.dtypes[(i + i // len(case.dtypes)) % len(case.dtypes)]]
    ]
