"""Served graph: traced from the trained layers, with matrix products that suit a CPU."""
