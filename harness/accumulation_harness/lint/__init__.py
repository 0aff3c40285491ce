"""What the source text of a training loop tells about accumulation, read without running it and without torch."""
