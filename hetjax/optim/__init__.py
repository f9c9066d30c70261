"""Optimizers; usable without the parallelizer."""
