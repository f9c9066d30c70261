"""Turns a user's function into a graph and back: linen, nnx and plain JAX."""
