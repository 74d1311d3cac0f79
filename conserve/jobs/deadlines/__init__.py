"""Deadlines of jobs: the work that is left, the order that keeps deadlines, and forecasts."""
