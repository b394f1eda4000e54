"""Nested against the other methods."""
