"""Layer-wise preemption: rows that leave an iteration between two layers, and join a later one."""
