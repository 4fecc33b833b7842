"""The loop, the plan of a run, the optimiser, losses and checkpoints."""

from regard.training.progress import Progress

__all__ = ["Progress"]
