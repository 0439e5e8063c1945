"""Checks of the functional API: typed errors, and which calls need no closer look."""
