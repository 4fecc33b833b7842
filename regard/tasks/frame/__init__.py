"""What all tasks share: settings, the start from a trained model, training, running, judging."""
