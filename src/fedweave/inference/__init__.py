"""Routing, sparse and soft generation."""
