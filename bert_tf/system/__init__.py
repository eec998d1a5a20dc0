"""Process, terminal and command line."""
