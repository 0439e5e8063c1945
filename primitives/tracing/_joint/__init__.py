"""Joint graphs: a function and its backward pass as one function, and as one graph."""
