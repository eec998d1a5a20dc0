"""BERT encoder: layers, batch layouts and fused training operations."""
