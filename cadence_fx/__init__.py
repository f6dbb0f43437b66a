"""Exact replay of streaming speech decoders from a declaration of their clocks."""

__version__ = "0.1.0"
