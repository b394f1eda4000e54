"""Adapters of every rank on real texts."""
