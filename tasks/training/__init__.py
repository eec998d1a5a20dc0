"""Training in a run directory, alone or from a teacher."""
