"""The results of `trace_joint`: joint graphs, their partition into forward and backward, their text."""
