"""What a model takes, counted without its weights: products, memory, and time on this machine."""
