"""Export of trained models as SavedModels, and clients for them.

A SavedModel is published only if its predictions match the trained model's.
"""
