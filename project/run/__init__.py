"""WHERE AND HOW it runs: the command line, the run directory, checkpoints, the summary. Keep these."""
