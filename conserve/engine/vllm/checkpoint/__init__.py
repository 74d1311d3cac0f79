"""KV checkpoints: blocks saved to host memory while a row runs, and restored after its eviction."""
