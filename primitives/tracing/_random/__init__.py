"""Random numbers from an explicit state."""
