"""What a plan costs, in seconds and bytes: from shapes, measurements or published tables."""
