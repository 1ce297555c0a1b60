"""A trained model as a folder that others can load: PEFT adapters, the router, a model card.

export.py       a bundle, one dense model, one adapter for a mixture; load.py reads a bundle; hub.py sends it
adapter.py      a PEFT adapter folder; card.py the model card; tokens.py the tokenizer with the template of training
programs.py     files for other programs, from gguf_model.py, gguf_tokens.py, ollama.py and mlx.py
"""
