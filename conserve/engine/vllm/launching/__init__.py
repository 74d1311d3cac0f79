"""Start of an engine: environment, flags, number format and processes."""
