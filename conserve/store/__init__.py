"""Durable state: jobs, leases, the journal, result shards, and SQL over all of them."""
