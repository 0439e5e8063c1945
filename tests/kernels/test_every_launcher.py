"""Every launcher is tunable, has calls, and launches every kernel; under each plan its results are the truth.

The cases are those of the emulator. `test_variants` holds what can meet in a kernel to the truth, `test_operands` all
that operands can be, and `test_records_on_kernels` the samples of the records, in their layouts and dtypes.
"""

import importlib
import pkgutil
import re
from types import ModuleType

import pytest
import torch
from torch import Tensor

import primitives.kernels
from perf.calls import EPS, launchers_of, random
from perf.ops.add_layer_norm import AddLayerNorm
from perf.ops.layer_norm import LayerNorm
from perf.ops.softmax import Softmax
from primitives.kernels.norms._launch import Backward
from primitives.kernels.rows.maps import RowMapKernels
from primitives.kernels.runtime.arithmetic import cdiv
from primitives.kernels.runtime.kernel import INTERPRETED, Kernel
from tests.kernels.calls import DTYPES, copying_calls, launched_by, short_rows, some_calls
from tests.kernels.truth import check
from tests.ptx.emulating import PROCESSORS
from tests.ptx.test_launchers import CASES

pytestmark = pytest.mark.usefixtures("on_device")

# Of several tiles, the last of which is partial.
TILE, LONG_ROW = 256, 500


# By day their compiled code is emulated, and held to the same.
@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_launcher(name, use_limits, use_processors):
    use_processors(PROCESSORS)
    use_limits(**CASES[name].limits)
    for call in CASES[name].calls():
        check(call)


@pytest.mark.parametrize("layout", ["contiguous", "strided", "transposed"])
def test_sums_of_several_long_rows(layout, use_processors):
    """Rows whose second halves lie behind the first ones, the last tile partial along rows and columns."""
    use_processors(1)
    dtype = torch.float32 if layout == "strided" else torch.bfloat16
    rows = LayerNorm.draw((2, 11, 700), dtype, batch_ndim=layout == "strided")
    if layout == "strided":
        rows = rows.change(x=rows.x[:, :9], y_bar=rows.y_bar[:, 2:])
    elif layout == "transposed":
        rows = rows.change(x=random(2, 700, 11, dtype=dtype).transpose(1, 2))
    for call in (rows.call("bwd"), AddLayerNorm.draw((19, 700), dtype).change(seed=None).call("bwd")):
        check(call)
        (args,) = (one.named for one in launched_by(call.results) if one.kernel.__name__.endswith("_bwd_kernel"))
        assert args["BLOCK_ROWS"] > 1
        assert args["num_splits"] < cdiv(args["num_rows"], args["BLOCK_ROWS"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_x_hat_is_rounded_before_the_weight(dtype):
    rows = LayerNorm.draw((6, 75), dtype).change(centered=False, bias=None)
    x_hat, weight = torch.rms_norm(rows.x.float(), (75,), None, EPS), rows.weight.float()

    def narrow(x: Tensor) -> Tensor:
        # The interpreter cuts bfloat16 off, where a GPU rounds.
        is_cut = INTERPRETED and dtype is torch.bfloat16
        return (x.view(torch.int32) & -(1 << 16)).view(torch.float32) if is_cut else x.to(dtype).float()

    values = {True: narrow(narrow(x_hat) * weight), False: narrow(x_hat * weight)}
    for call in rows.change(rounded=True).calls("fwd", "fwd_jvp"):
        # Sums in another order tip a rounding here and there.
        same = {is_rounded: (call.results()[0] == value).float().mean() for is_rounded, value in values.items()}
        assert same[True] > 0.98 > same[False]


@pytest.mark.parametrize("splits", [0, 1, 32], ids=["in registers", "swept", "shared"])
def test_a_mask_that_heads_share_is_read_where_it_lies(splits, use_limits):
    num_cols = 24
    if splits:
        use_limits(**short_rows(TILE, splits))
        num_cols = LONG_ROW
    shape, dtype = (2, 3, 2, num_cols), DTYPES[splits % 3]
    mask = random(2, 1, 2, num_cols, seed=7) > 0.0 if splits else random(2, 1, 2, num_cols, dtype=dtype, seed=7)
    call = Softmax.draw(shape, 3, dtype).change(mask=mask.expand(shape), scale=0.7).call("fwd_jvp")
    check(call)
    assert {one.named["mask_ptr"].data_ptr() for one in launched_by(call.results)} == {mask.data_ptr()}


def test_operands_that_no_view_fits():
    for number, call in enumerate(copying_calls(torch.float32)):
        check(call if number % 2 else copying_calls(torch.float64)[number])


def modules() -> list[ModuleType]:
    """Those of the rooms of families, in which a module of launchers has no underscore."""
    names = [module.name for module in pkgutil.walk_packages(primitives.kernels.__path__, "primitives.kernels.")]
    of_no_family = re.compile(r"primitives\.kernels\.(runtime\b.*|\w+)")
    return [importlib.import_module(name) for name in names if not of_no_family.fullmatch(name)]


def test_every_launcher_is_tuned_and_has_calls():
    public = [module for module in modules() if not re.search(r"\._|\.rows\.", module.__name__)]
    launchers = {name: function for module in public for name, function in launchers_of(module).items()}
    assert launchers.keys() <= {call.launcher.__name__ for call in some_calls()}
    assert all(hasattr(function, "__wrapped__") for function in launchers.values())


def test_every_kernel_is_launched(use_limits):
    things = [thing for module in modules() for thing in vars(module).values()]
    for thing in things:  # which grows
        thing = thing.kernels if isinstance(thing, RowMapKernels) else thing
        things += thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, Backward)) else ()
    kernels = {thing for thing in things if isinstance(thing, Kernel)}
    launched: set[Kernel] = set()
    for limits in ({}, short_rows(16, 1)):
        use_limits(**limits)
        launched |= {one.kernel for call in some_calls() for one in launched_by(call.results)}
    assert kernels <= launched, f"kernels that no gate launches: {[one.__name__ for one in kernels - launched]}"
