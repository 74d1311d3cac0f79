"""Exactly-once bookkeeping: jobs, leases, the journal, shards, and what can be read of them."""
