"""What the stored results say: loading, tables, figures and the report. Reads the store, never torch."""

import harness as harness  # first of all: it says what Ctrl-C does while the rest is imported
