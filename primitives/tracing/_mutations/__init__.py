"""Functions that write in place, as functions that return what they wrote."""
