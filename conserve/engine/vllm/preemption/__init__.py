"""Layer-wise preemption: rows leave an iteration between two layers, and join a later one there."""
