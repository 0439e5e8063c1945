"""What the tests of pure modules share."""

import torch

CLOSE = {"rtol": 1e-11, "atol": 1e-11}


def data(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def snapshot(model):
    """Everything that a call may not change: the objects that are registered, other attributes, and the values."""
    objects = {
        name: (dict(module.__dict__), dict(module._parameters), dict(module._buffers))
        for name, module in model.named_modules(remove_duplicate=False)
    }
    return objects, {name: value.clone() for name, value in model.state_dict().items()}


def assert_untouched(model, before):
    objects, values = before
    after, after_values = snapshot(model)
    assert list(after) == list(objects)
    for name, parts in after.items():
        for part, old in zip(parts, objects[name], strict=True):
            assert list(part) == list(old), name
            assert all(part[key] is old[key] for key in part), name
    for name, value in after_values.items():
        assert torch.equal(value, values[name]), name


def assert_buffers(buffers, model, exact=False):
    expected = dict(model.named_buffers())
    assert list(buffers) == list(expected)
    for name, value in expected.items():
        assert buffers[name].dtype == value.dtype
        if exact:
            assert torch.equal(buffers[name], value), name
        else:
            torch.testing.assert_close(buffers[name], value, **CLOSE)
