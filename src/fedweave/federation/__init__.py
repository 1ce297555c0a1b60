"""The protocol: clients, engines, the round loop and checkpoints."""
