"""The algebra of submodels: labels, layouts, selections, rankings, and the movements of weights. Torch only."""
