"""A trained model as a folder that others can load: PEFT adapters, the router, a model card."""
