"""Modules as pure functions of their parameters and buffers."""
