"""Training data: sources (text, JSONL, synthetic), the rows cut from them, and batches by step."""
