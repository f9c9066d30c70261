"""The planner's search: which devices, how cut, how sharded, in how many microbatches."""
