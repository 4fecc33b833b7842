"""Recurrent networks: cells, attention to a memory, and a decoder of both."""
