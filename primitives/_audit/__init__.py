"""Which derivatives of a model torch would get wrong: `primitives.audit`."""
