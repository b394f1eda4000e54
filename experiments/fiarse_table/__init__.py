"""FIARSE's table: all methods on CIFAR-10 and CIFAR-100, honestly and as published."""
