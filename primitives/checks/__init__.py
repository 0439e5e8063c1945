"""Checks of the functional API: the fast path of calls that need no closer look, and typed errors for all others."""
