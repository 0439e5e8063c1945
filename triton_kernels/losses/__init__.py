"""Cross-entropy."""
