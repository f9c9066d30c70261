"""Numeric work on arrays and bytes; imports nothing else of hetjax."""
