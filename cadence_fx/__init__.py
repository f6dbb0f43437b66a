"""Exact replay of streaming speech decoders from a declaration of their clocks."""
