"""One file per family of primitives, with every rule of it: maths, schema, reference, kernel, vjp, jvp, vmap."""
