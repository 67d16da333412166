"""Analysis: figures, reports, comparison, and the command line's front door."""
