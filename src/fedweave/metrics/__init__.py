"""Scores of answers, for every kind of task and in any script; a function of the user's own."""
