"""Data: sources, client splits, and batches that are made on the device."""
