"""After training: the best submodel under a limit, found without further training."""
