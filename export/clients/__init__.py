"""Clients of published models, and their signatures."""
