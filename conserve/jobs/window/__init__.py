"""The waiting rows among which a harvester chooses: prefix tree and freshness."""
