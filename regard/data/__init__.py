"""Data of all kinds: found, read, split, tokenised and put into batches."""

from regard.data.seeds import mix

__all__ = ["mix"]
