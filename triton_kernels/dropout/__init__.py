"""Dropout, and Philox's random words."""
