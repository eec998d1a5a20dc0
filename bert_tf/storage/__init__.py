"""Files: local and remote paths, locks, strict JSON and format versions."""
