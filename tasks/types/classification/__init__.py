"""Classification of a text or pair."""
