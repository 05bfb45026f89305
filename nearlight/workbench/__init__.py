"""The workbench: write an op, check it, measure it, look into it."""
