"""Rounds: plan, train, tally, evaluate, save. The tiny federated library, torch only."""
