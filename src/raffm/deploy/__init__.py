"""Training across machines: what travels, and what a node does with it."""
