"""Records as something to look at."""
