"""Figures and traces of a harvester, for the tools that watch it: nothing is imported before it is asked for."""
