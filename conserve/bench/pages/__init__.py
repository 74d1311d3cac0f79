"""Pages of the benchmark: tables, sentences and drawings of what was measured."""
