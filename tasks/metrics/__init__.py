"""Metrics of complete datasets and values fitted to dev sets, as pure NumPy functions.

No metric is NaN: the docstrings give the value of undefined cases.
"""
