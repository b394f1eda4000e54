"""What one trained model gives afterwards, without further training."""
