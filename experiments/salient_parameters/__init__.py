"""Salient parameters first: the published table, submodels of ten sizes, and federated training with and without them."""
