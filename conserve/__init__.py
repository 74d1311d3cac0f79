"""ConServe: run batch LLM work on the engine that serves live traffic, and never lose a row."""

__version__ = "0.1.0"
