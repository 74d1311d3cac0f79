"""Exactly-once bookkeeping: jobs, leases, the journal, shards, and readings of them."""
