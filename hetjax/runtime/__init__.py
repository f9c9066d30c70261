"""Compiles and executes programs; knows nothing of search."""
