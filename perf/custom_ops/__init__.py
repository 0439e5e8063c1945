"""What `torch.library.custom_op` and `primitives.custom_op` do with the same operator, run side by side.

Every cell is executed: values are compared with those of plain torch in float64, and of mistakes in rules it is asked
whether an error names the operator, the argument and the file of the rule.

Run: `python -m perf.custom_ops [--full] [--no-compile]`. The exit status is 1 if this package fails a row.
"""
