"""One folder a question: command, figures, raw results."""
