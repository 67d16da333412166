"""The executor: runs a step program on streams and threads, and trains with it."""
