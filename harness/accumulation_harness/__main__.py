"""`python -m accumulation_harness COMMAND ...`, as `accumulation-harness COMMAND ...`."""

from accumulation_harness.cli import main

main()
