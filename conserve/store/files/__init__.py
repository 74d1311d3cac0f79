"""Folders and files of a home: their paths, marks and digests, and the trash."""
