"""Mutation runs: change the code in one place, run the tests that reach it, list the changes no test notices."""
