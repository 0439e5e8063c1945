"""Layer norm, RMS norm, group norm, and the norms of a sum."""
