"""Measuring: avg@k with intervals, paired differences, and results that may be compared."""
