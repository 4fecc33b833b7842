"""What a trained model does and why: causes, heads with names, features, directions."""
