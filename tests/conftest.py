"""Tiny random models of every tested family, made here, with a tokenizer trained on the built-in sample."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

# Before fedweave is imported: tests neither read nor fill the user's cache, and never call out.
os.environ["FEDWEAVE_CACHE"] = tempfile.mkdtemp(prefix="fedweave-test-cache-")
os.environ["HF_HUB_OFFLINE"] = "1"

from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from fedweave.backbone.load import Backbone, load_backbone
from fedweave.config import BackboneConfig
from fedweave.data.sample import make_sample

torch.set_num_threads(2)
atexit.register(shutil.rmtree, os.environ["FEDWEAVE_CACHE"], ignore_errors=True)

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 8,
}
FAMILIES = {
    "llama": lambda v: LlamaConfig(vocab_size=v, tie_word_embeddings=True, **SHAPE),
    "qwen2": lambda v: Qwen2Config(vocab_size=v, **{k: x for k, x in SHAPE.items() if k != "head_dim"}),
    # windows of 8 tokens and real soft-caps, so that getting either wrong shows
    "gemma2": lambda v: Gemma2Config(
        vocab_size=v,
        sliding_window=8,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
        query_pre_attn_scalar=8,
        **SHAPE,
    ),
    "gemma3": lambda v: Gemma3TextConfig(vocab_size=v, sliding_window=8, query_pre_attn_scalar=8, **SHAPE),
}


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    pools, _ = make_sample(60, seed=0)
    text = [f"{e.prompt} {e.response} Response:" for pool in pools.values() for e in pool]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>", "<|start|>", "<|end|>"]
    bpe.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="session")
def chat_tokenizer(tokenizer) -> PreTrainedTokenizerFast:
    chat = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<|start|>", "<|end|>"],
    )
    chat.chat_template = TEMPLATE
    return chat


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, tokenizer):
    """Call with a family's name to get a Hugging Face folder of a tiny random model."""
    made: dict[str, Path] = {}

    def make(family: str = "llama") -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(f"tiny-{family}")
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(FAMILIES[family](len(tokenizer)))
            with torch.no_grad():  # random models are nearly linear: larger weights make mistakes visible
                for name, p in model.named_parameters():
                    if p.ndim == 2 and "embed" not in name:
                        p.mul_(4.0)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            made[family] = folder
        return made[family]

    return make


@pytest.fixture(scope="session")
def backbone_of(model_folder):
    """Call with a family's name to get its loaded backbone (float32, CPU, plain prompts)."""
    made: dict[str, Backbone] = {}

    def make(family: str = "llama") -> Backbone:
        if family not in made:
            made[family] = load_backbone(
                BackboneConfig(model=str(model_folder(family)), device="cpu", max_length=128)
            )
        return made[family]

    return make


@pytest.fixture
def backbone(backbone_of) -> Backbone:
    return backbone_of("llama")


@pytest.fixture
def smooth_optimiser(monkeypatch):
    """For tests that train in two ways. AdamW divides a gradient by its own size, so one that is rounding alone
    moves its weight as far as any other, in whichever direction rounding points; a larger ε leaves such weights
    where they are."""
    monkeypatch.setattr(torch.optim, "AdamW", partial(torch.optim.AdamW, eps=1e-4))


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium; it logs console messages and requests."""
    binary = next(
        (p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None
    )
    driver_path = shutil.which("chromedriver")
    if not binary or not driver_path:
        pytest.skip("chromium and chromedriver are not installed (apt-get install chromium chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1200,900")
    for flag in flags:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(driver_path))
    yield driver
    driver.quit()
