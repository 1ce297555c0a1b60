"""Tiny random models of every tested family, made here, with a tokenizer trained on the built-in sample; finished
runs of them; the command line; a browser."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

# Before fedweave is imported: tests neither read nor fill the user's cache, and never call out.
os.environ["FEDWEAVE_CACHE"] = tempfile.mkdtemp(prefix="fedweave-test-cache-")
os.environ["HF_HUB_OFFLINE"] = "1"
# Tiny tensors gain nothing from a second thread: two would wait for each other most of the time, here and in every
# process that a test starts. Tests use all cores by running side by side.
os.environ["OMP_NUM_THREADS"] = "1"

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
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from fedweave.backbone.load import Backbone, load_backbone
from fedweave.cli import main
from fedweave.config import BackboneConfig, Config, from_tree
from fedweave.data.sample import make_sample
from tests.helpers import SMALL, contents

torch.set_num_threads(1)  # also where torch was imported before this file
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
STRETCHED = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}  # their own lie beyond a small vocabulary
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
    "llama3": lambda v: LlamaConfig(vocab_size=v, rope_parameters=STRETCHED, **SHAPE),
    "qwen3": lambda v: Qwen3Config(vocab_size=v, **SHAPE),
    "mistral": lambda v: MistralConfig(vocab_size=v, sliding_window=8, **SHAPE),
    # joined products; three quarters of a head rotate
    "phi3": lambda v: Phi3Config(
        vocab_size=v,
        sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        **SPECIAL,
        **{k: x for k, x in SHAPE.items() if k != "head_dim"},
    ),
    "smollm3": lambda v: SmolLM3Config(vocab_size=v, no_rope_layers=[1, 0], **SPECIAL, **SHAPE),
}


LONGEST = ("test_deployment.py", "test_distributed.py", "test_docs.py", "test_page.py", "test_faults.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: several processes then end at about the same time."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


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
                    elif "q_norm" in name or "k_norm" in name:
                        p.add_(torch.randn(p.shape) / 4)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            made[family] = folder
        return made[family]

    return make


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory, tokenizer) -> Path:
    """A Llama whose rows are long enough for quantised blocks of 256, with an output layer of its own."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, num_hidden_layers=2, head_dim=32,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def backbone_of(model_folder):
    """Call with a family's name to get its loaded backbone (float32, CPU, plain prompts); with ``fused=False`` its
    layers are transformers' own."""
    made: dict[tuple[str, bool], Backbone] = {}

    def make(family: str = "llama", fused: bool = True) -> Backbone:
        if (family, fused) not in made:
            settings = BackboneConfig(model=str(model_folder(family)), device="cpu", max_length=128, fused=fused)
            made[family, fused] = load_backbone(settings)
        return made[family, fused]

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


# -------------------------------------------------------------------------------------- runs and federations


@pytest.fixture(scope="session")
def small(model_folder) -> list[str]:
    """Overrides that make the quickstart recipe tiny."""
    return [f"backbone.model={model_folder('llama')}", *SMALL]


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory, small):
    """Call with further overrides to get the folder of a finished run, made once for all tests. It is only read;
    `tiny_copy` gives copies that may be changed."""
    made: dict[tuple[str, ...], Path] = {}

    def make(*overrides: str) -> Path:
        if overrides not in made:
            folder = tmp_path_factory.mktemp("shared") / "run"
            assert main(["run", "quickstart", *small, *overrides, f"output={folder}", "--quiet"]) == 0
            made[overrides] = folder
            before[folder] = contents(folder)
        return made[overrides]

    before: dict[Path, dict] = {}
    yield make
    for folder, files in before.items():
        assert contents(folder) == files, f"a test has changed {folder}, which others read"


@pytest.fixture
def tiny_copy(tiny_run, tmp_path):
    """As `tiny_run`, but a copy that this test may change."""

    def make(*overrides: str) -> Path:
        return shutil.copytree(tiny_run(*overrides), Path(tempfile.mkdtemp(dir=tmp_path)) / "run")

    return make


@pytest.fixture(scope="session")
def trained(tiny_run) -> Path:
    """A run whose answers go on to their limit, since no end token is trained: streams, stop strings and hang-ups
    have something to work on."""
    return tiny_run("training.lr=1e-2", "backbone.end_of_answer=false")


@pytest.fixture(scope="session")
def exported(trained, tmp_path_factory) -> Path:
    """Its bundle, which is only read."""
    from fedweave.runs.use import export_run

    folder = tmp_path_factory.mktemp("exported") / "bundle"
    export_run(trained, folder)
    return folder


@pytest.fixture
def config(model_folder) -> Config:
    """A small federation for tests that call methods and engines directly."""
    return from_tree({
        "backbone": {"model": str(model_folder("llama")), "max_length": 128, "prompt": "plain"},
        "data": {"clients": 3, "alpha": 1.0, "train": 10, "validation": 2, "test": 2},
        "experts": {"rank": 4, "dropout": 0.0},
        "discovery": {"warmup_steps": 2, "max_buckets": 3, "restarts": 2},
        "training": {"rounds": 1, "local_steps": 4, "batch_size": 4, "lr": 1e-2},
        "router": {"hidden": 16, "lr": 1e-2, "warm_start": {"rounds": 1, "steps": 3}},
    })  # fmt: skip


# -------------------------------------------------------------------------------------- the command line


@pytest.fixture
def says(capsys):
    """Call with the arguments of a command that succeeds to get its standard output."""

    def call(*argv: object) -> str:
        capsys.readouterr()  # what came before
        assert main([str(part) for part in argv]) == 0
        return capsys.readouterr().out

    return call


@pytest.fixture
def complains(capsys):
    """Call with the arguments of a command that fails to get its one sentence."""

    def call(*argv: object) -> str:
        capsys.readouterr()
        assert main([str(part) for part in argv]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("fedweave: ") and err.endswith("\n") and err.count("\n") == 1
        return err

    return call


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
