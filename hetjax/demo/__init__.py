"""The shipped demonstration: a small Flax GPT on two unlike sites."""
