"""What joins a step to the search: its layers as a table, outlines as plans, plans kept and fitted."""
