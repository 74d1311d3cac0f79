"""Rows of an input file, whatever its format."""
