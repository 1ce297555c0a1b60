"""FedWeave: federated mixture-of-LoRA-experts fine-tuning. Experts need purity, routers need contrast."""

__version__ = "0.1.0"
