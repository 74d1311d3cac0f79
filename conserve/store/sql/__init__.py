"""SQL over jobs, requests and results, and their export."""
