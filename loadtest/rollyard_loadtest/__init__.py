"""Measurements of a Rollyard service: what a run costs, and where."""
