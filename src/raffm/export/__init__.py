"""Submodels as files that a device's runtime runs."""
