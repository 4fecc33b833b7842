"""Scores of every task, each with its signature, one paired bootstrap and one interval."""
