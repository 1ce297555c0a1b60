"""The router: a small MLP on the cached prompt feature."""
