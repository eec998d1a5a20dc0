"""Task types: one module or package each, with all that only this type needs."""
