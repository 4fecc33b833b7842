"""Comparisons: variants of a task trained with several seeds, their report, and loss by length."""
