"""Damage found and mended, orphans swept, jobs removed."""
