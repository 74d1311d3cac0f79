"""Evaluations, night after night: is the model worse than it was?"""
