"""Functions of tensor subclasses as functions of plain tensors."""
