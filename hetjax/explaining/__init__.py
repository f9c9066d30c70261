"""Why a plan is what it is: its stages, what moves, what memory holds, and why a value is where it is."""
