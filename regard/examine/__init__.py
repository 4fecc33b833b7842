"""A look over data before they are trained on: faults with their remedy, and a forecast."""
