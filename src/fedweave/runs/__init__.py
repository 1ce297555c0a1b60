"""A run from config to summary: workspace, run folder, loop, final test."""
