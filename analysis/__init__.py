"""What the stored results say: loading, tables, figures and the report. Reads the store, never torch."""
