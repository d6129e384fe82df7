"""Intra-device parallelism: what it could be worth, and the best order of nano-operations."""
