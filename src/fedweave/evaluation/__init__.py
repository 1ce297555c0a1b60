"""Losses, scores, the alignment audit and the routing table."""
