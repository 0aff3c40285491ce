"""Watches for trainers: each attaches when training begins and detaches when it ends."""
