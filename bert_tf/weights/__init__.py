"""Loading of pretrained weights: Google, Hugging Face, keras-hub and own runs."""
