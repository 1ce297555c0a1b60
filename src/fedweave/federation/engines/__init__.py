"""Where clients run: in this process, in several that torchrun started, or behind Flower."""
