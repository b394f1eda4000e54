"""One federated round of ours beside pfl-research, Flower's simulation and plain loops: `make bench-others`."""
