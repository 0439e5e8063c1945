"""Compiled functions that have derivatives of every order: `primitives.compile`."""
