"""Structures of the arguments and results of a call, and the table of those of an operator."""
