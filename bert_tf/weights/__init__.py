"""Loading of pretrained weights: Google, Hugging Face, keras-nlp and own runs."""
