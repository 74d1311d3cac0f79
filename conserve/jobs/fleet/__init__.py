"""Many servers as one endpoint: where each row goes, and what becomes of it when a server slows down or leaves."""
