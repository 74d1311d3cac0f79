"""From rows to a job's requests, in execution order."""
