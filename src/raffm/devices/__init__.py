"""What a device can hold, and what a submodel costs."""
