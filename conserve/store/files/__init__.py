"""Folders and files of a home: where they lie, whose they are, whether they are what was written."""
