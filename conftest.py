"""Shared by the examples in docs and README: they read as users type them, and run without a compiler."""

import functools

import pytest


@pytest.fixture(autouse=True)
def _traced_without_a_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what `primitives.compile` traces as it is, in doctests: Inductor would take a minute a page."""
    if isinstance(request.node, pytest.DoctestItem):
        import primitives

        monkeypatch.setattr(primitives, "compile", functools.partial(primitives.compile, backend="eager"))
