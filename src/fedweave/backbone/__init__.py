"""The frozen backbone: where it comes from, how text becomes tokens, packed passes, cached features."""
