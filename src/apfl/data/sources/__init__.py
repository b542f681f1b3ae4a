"""Where samples come from: one file for each source."""
