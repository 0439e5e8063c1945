"""What `trace_joint` returns: joint graphs, their partition into forward and backward, their text."""
