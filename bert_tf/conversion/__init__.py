"""Conversion of weights to the formats of other libraries, and to other vocabularies."""
