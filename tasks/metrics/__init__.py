"""Metrics and what is fitted to a dev set, in numpy: pure functions over a whole data set.

None of them returns NaN: each docstring says what stands for what is undefined.
"""
