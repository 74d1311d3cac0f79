"""The model that an engine runs: its files, its identity, the key of its profile."""
