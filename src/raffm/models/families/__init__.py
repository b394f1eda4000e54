"""One table a family."""
