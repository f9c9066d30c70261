"""Pictures of plans, programs, clusters and runs: inline SVG and HTML without script or network."""
