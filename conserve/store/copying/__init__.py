"""Copies of a store: in another database (move), and in a folder or an archive (backup, restore)."""
