"""One file per family of primitives, with every rule of it: math, schema, reference, kernel, vjp, jvp, vmap."""
