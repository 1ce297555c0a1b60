"""LoRA experts: flat layout, stacked mixture."""
