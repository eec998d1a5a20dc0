"""Run directories: their files, checkpoints and event files."""
