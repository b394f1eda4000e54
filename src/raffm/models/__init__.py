"""The only folder that knows families of models."""
