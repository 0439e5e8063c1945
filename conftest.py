"""Shared by the examples in docs and README: they read as users type them, and run without a compiler."""

import functools
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _as_a_fresh_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run what `primitives.compile` traces as it is, in doctests: Inductor would take a minute a page.

    A page that fails between `repair_torch()` and `undo()` leaves torch as it was.
    """
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    import primitives

    monkeypatch.setattr(primitives, "compile", functools.partial(primitives.compile, backend="eager"))
    yield
    if primitives.is_repaired():
        primitives.repair_torch().undo()
