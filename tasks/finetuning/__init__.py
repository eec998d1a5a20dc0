"""Fine-tuning from files: settings, sweeps and dry runs."""
