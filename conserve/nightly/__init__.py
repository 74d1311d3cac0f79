"""Nights: suites of nightly.toml asked through the durable queue, scored, kept, compared and reported."""
