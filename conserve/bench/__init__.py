"""The comparison of policies on one engine: arrivals, the load generator, statistics and reports."""
