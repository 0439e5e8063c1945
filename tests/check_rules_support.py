"""What the tests of `check_rules` share."""

from __future__ import annotations

import runpy

import pytest

from primitives.testing import RuleError, check_rules

# The compiler takes most of the time; it is checked where it matters.
FAST = {"compile": False}


def failure(op, *args, **options):
    with pytest.raises(RuleError) as caught:
        check_rules(op, *args, **options)
    return caught.value


def run(program, tmp_path):
    path = tmp_path / "reproducer.py"
    path.write_text(program)
    return runpy.run_path(str(path))
