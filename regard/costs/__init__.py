"""What a model takes, counted without its weights: products, memory, and time on this machine."""

from regard.costs.count import PRODUCTS, pretend, tensors
from regard.costs.count import count as count_operations
from regard.costs.report import binary, short, table

__all__ = ["PRODUCTS", "binary", "count_operations", "pretend", "short", "table", "tensors"]
