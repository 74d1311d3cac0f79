"""Reports on a run: one document, and its forms."""
