"""LoRA experts: flat layout, stacked mixture, keyed dropout."""
