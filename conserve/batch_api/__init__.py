"""OpenAI's Batch API over a store: files and batches as HTTP routes, without an engine."""
