"""Studies that take a GPU for an hour, on a small model, on a CPU, in minutes: hostile clients, privacy.

    python -m benchmarks.small attacks|attack-rules|private-search|private [--output FOLDER] [key=value …]

Makes a Llama of three layers that knows the words of the built-in sample and the shape of its answers, but not
which answer belongs to which prompt, and runs ``fedweave compare STUDY`` on it, with clients of the sample.
Whatever stands in FOLDER is not done again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from fedweave.compare import compare
from fedweave.console import Console
from fedweave.data.hostile import exchanged
from fedweave.data.sample import make_sample

STEPS, BATCH, ROWS, LR = 600, 32, 400, 2e-3
SETTINGS = [
    "data.source=sample", "data.train=400", "data.validation=20", "data.test=50", "data.distinct=true",
    "backbone.prompt=plain", "backbone.max_length=96", "backbone.device=cpu", "experts.dropout=0.0",
]  # fmt: skip


def small_model(folder: Path) -> Path:
    """Three layers, trained on prompts of the sample with answers of other prompts of the same kind."""
    pools, _ = make_sample(ROWS, seed=7)  # not the rows of any run's seed
    rows = [row for pool in pools.values() for row in exchanged(pool)]
    texts = [f"{row.prompt}\n\nResponse: {row.response}<eos>" for row in rows]  # as prompt=plain has it
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(
            vocab_size=600, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet, show_progress=False
        ),
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=3, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    pace = torch.optim.lr_scheduler.OneCycleLR(optimiser, LR, STEPS)
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        batch = tokenizer([texts[i] for i in rng.choice(len(texts), BATCH)], return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        pace.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", metavar="STUDY")
    parser.add_argument("--output", type=Path, default=Path("runs/small"))
    parser.add_argument("--record", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()  # options may stand between the study and its settings
    model = arguments.output / "small"
    if not (model / "model.safetensors").is_file():
        small_model(model)
    overrides = [f"backbone.model={model}", *SETTINGS, *arguments.overrides]
    output = arguments.output / arguments.study
    print(compare([arguments.study], overrides, [output], None, Console(), record=arguments.record))


if __name__ == "__main__":
    main()
