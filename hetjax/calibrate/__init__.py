"""Measuring what a plan's prices rest on: layers, products and copies on local devices, links between hosts."""
