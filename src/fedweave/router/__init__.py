"""The router: a small MLP on the cached prompt feature, and its warm start."""
