"""What a guarantee costs: the noise that a target takes, and what has been spent of it."""
