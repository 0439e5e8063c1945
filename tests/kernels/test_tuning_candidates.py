"""The plans that tuning tries compute what the default plans do."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.calls import short_rows
from triton_kernels import batch_norm, dropout, layer_norm, layer_norm_second_order, log_softmax, philox, tuning
from triton_kernels._tuning_store import Choice


@pytest.fixture
def path(tmp_path):
    """Where choices are kept; tuning is off again after the test."""
    yield tmp_path / "plans.json"
    tuning.disable()


def launch_rows(num_rows, num_cols):
    x, y_bar, weight = torch.randn(num_rows, num_cols), torch.randn(num_rows, num_cols), torch.randn(num_cols)
    y, mean, rstd = layer_norm.layer_norm_fwd(x, weight, weight, 1, 0, 1e-5)
    layer_norm.layer_norm_bwd(y_bar, x, weight, mean, rstd, 1, 0, (True,) * 3)
    layer_norm_second_order.layer_norm_pairing(
        y_bar, x, weight, mean, rstd, y, None, None, 1, 0, (True,) * 3 + (False,) * 3
    )
    y = log_softmax.log_softmax_fwd(x, 1, None)
    log_softmax.log_softmax_bwd(y_bar, y, 0, x.dtype)


def launch_channels():
    x = torch.randn(2, 1, 40)
    _, mean, rstd, *_ = batch_norm.batch_norm_train_fwd(x, None, None, None, None, 0, 0.1, 1e-5)
    batch_norm.batch_norm_train_bwd(x, x, None, mean, rstd, 0, (True, False, False))


def launch_random():
    seeds = torch.tensor([3, 5])
    dropout.dropout_fwd(torch.randn(2, 50), seeds, None, 0.5, 1)
    dropout.dropout_fwd(torch.randn(30, 4).T, seeds[0], None, 0.5, 0)
    philox.philox_words(seeds, seeds, (50,))


ROW_FUNCTIONS = {"plan_layer_norm_rows", "plan_layer_norm_params", "plan_log_softmax", "plan_layer_norm_second"}
CASES = {
    "rows in registers": (lambda: launch_rows(9, 20), {}, ROW_FUNCTIONS - {"plan_layer_norm_rows"}),
    "rows swept": (
        lambda: launch_rows(2, 24),
        short_rows(16, 32),
        {*ROW_FUNCTIONS, "plan_layer_norm_second_columns"},
    ),
    "channels": (
        launch_channels,
        {"channel_tile_bytes": 256},
        {"plan_channel_reduction", "plan_channel_transform", "plan_channel_merge"},
    ),
    "random words": (launch_random, {}, {"plan_dropout", "plan_philox"}),
}


@pytest.mark.parametrize("launch_case, limits, functions", CASES.values(), ids=CASES)
def test_candidates_compute_the_same(launch_case, limits, functions, path, monkeypatch, use_limits, use_processors):
    use_limits(**limits)
    use_processors(1)
    torch.manual_seed(0)
    tried = set()

    def compared(self, request, run, expected):
        for plan in request.candidates():
            results, _ = self._watch(run, (request.key, plan))
            assert tuning.agree(results, expected), (request.key, plan)
        tried.add(request.key.function)
        return Choice(request.default, request.default, 1.0, 1.0)

    monkeypatch.setattr(tuning.Tuner, "_choose", compared)
    tuning.enable(path, on_any_device=True)
    launch_case()
    assert tried >= functions
