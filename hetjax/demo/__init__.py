"""The demo: a small GPT trained on two unlike sites, and proved equal to plain jit."""
