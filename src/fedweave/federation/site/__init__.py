"""A site of a real federation: its own data, its own model files, and the questions that it answers."""
