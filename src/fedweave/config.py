"""One typed, validated tree of settings: defaults, then a YAML recipe, then dotted overrides.

Every key carries its own documentation and its own limits, so that an unknown key or a bad value becomes
one sentence before anything loads, and so that ``fedweave config`` can print the whole reference.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml

from fedweave.config_method import (
    AlignmentConfig,
    AttackConfig,
    DiscoveryConfig,
    ExpertsConfig,
    LivingConfig,
    PrivacyConfig,
    RouterConfig,
    TrainingConfig,
)
from fedweave.errors import UserError, nearest
from fedweave.files import read_text
from fedweave.rules import check_together
from fedweave.settings import Tree, build, insert, read_yaml, read_yaml_value, setting, to_tree

RECIPES = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class BackboneConfig:
    """The frozen language model and how text becomes tokens."""

    model: str = setting(
        "HuggingFaceTB/SmolLM2-135M-Instruct", "Hub id, local folder, or a .gguf file of the backbone."
    )
    revision: str | None = setting(None, "Branch, tag or commit of a hub model.")
    device: str = setting("auto", "auto (CUDA when there is one), cpu, cuda or cuda:N.")
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "Weights of the backbone: auto is bfloat16 on CUDA and float32 on a CPU; docs/performance.md says more.",
    )
    weights: Literal["dense", "stored", "nf4", "nf4-double"] = setting(
        "dense",
        "How weights stay in memory: dense is backbone.dtype; stored leaves those of a .gguf file as they are (4 "
        "to 8 bits); nf4 makes 4-bit ones of any model, nf4-double with smaller scales. Products unpack them.",
    )
    prompt: Literal["auto", "plain", "chat"] = setting(
        "auto",
        "chat renders the tokenizer's chat template; plain is 'prompt, blank line, Response:'; "
        "auto is chat where the tokenizer has a template.",
    )
    pool: Literal["all", "content"] = setting(
        "all",
        "Which prompt tokens the feature averages: the whole rendered prompt, or the user's words without the "
        "template's constant parts.",
    )
    turns: Literal["last", "all"] = setting(
        "last",
        "What the router reads of a conversation, in training and in use: its last user turn behind the system "
        "prompt, as if asked alone, or all turns. Experts always read all of it.",
    )
    end_of_answer: bool = setting(True, "Append the end token to every answer and train on it.")
    fused: bool = setting(
        True, "Run known architectures (docs/backbones.md) through fused operations; false: transformers' layers."
    )
    max_length: int = setting(
        512, "Longest sequence in tokens; a longer prompt loses its beginning.", low=16, high=1_000_000
    )


@dataclass(frozen=True)
class DataConfig:
    """Where examples come from and how they reach the clients."""

    source: Literal["sample", "paper", "tasks", "jsonl", "sites"] = setting(
        "sample",
        "sample: four built-in patterns; paper: CoEdIT, GSM8K, TweetEval and ARC-C; tasks: a folder of tasks and "
        "rows; jsonl: your own files, also CSV or Parquet; sites: every site of a deployment has its own.",
    )
    name: str | None = setting(None, "What tables call this data; changes nothing else.")
    path: str | None = setting(
        None,
        "jsonl: a folder of clients' files, one file, or hf://owner/name. paper: a local folder (hub when empty). "
        "tasks: the folder.",
    )
    folder: str | None = setting(None, "tasks: a folder below data.path, where that holds several benchmarks.")
    fields: tuple[str, ...] = setting(
        (), "jsonl: names of your columns, as in prompt=question,response=answer,client=site.", pairs=True
    )
    tasks: tuple[str, ...] = setting((), "Only these tasks, by name, as in [gsm8k]; all when empty.")
    wording: Literal["usual", "varied"] = setting(
        "usual", "usual: every task has one wording; varied: every row one of its task's, drawn by the seed."
    )
    distinct: bool = setting(
        True, "Leave out rows of a task that repeat another one's text, so that no test row was trained on."
    )
    clients: int = setting(
        20, "Number of simulated clients (all but own rows that name their client).", low=1, high=1_000_000
    )
    partition: Literal["dirichlet", "pure"] = setting(
        "dirichlet", "dirichlet: every client has its own mixture of kinds; pure: every client has one kind."
    )
    alpha: float = setting(0.3, "Dirichlet concentration of the clients' mixtures of kinds.", low=1e-3, high=1e9)
    train: int = setting(2000, "Training examples per task (sample, paper and tasks).", low=1)
    validation: int = setting(100, "Validation examples per task.", low=1)
    test: int = setting(400, "Test examples per task.", low=1)
    holdout: float = setting(
        0.1,
        "jsonl without validation.jsonl or test.jsonl: the share of each client's rows kept for each.",
        low=0.0,
        high=0.4,
    )
    long_answers: Literal["error", "skip"] = setting(
        "error", "What to do with a row whose answer leaves no room for its prompt."
    )
    changes: tuple[str, ...] = setting(
        (),
        "Who gains or loses a kind of rows before which round (sample, paper and tasks), as in ['10: client_0, "
        "client_1 gain sum', '12: all lose mood']; docs/living.md.",
    )


@dataclass(frozen=True)
class FederationConfig:
    """Between client and server: how updates travel, what the server accepts, when a round counts."""

    update_dtype: Literal["float32", "bfloat16", "int8"] = setting(
        "float32",
        "How a client's update travels; bfloat16 halves the bytes and int8 quarters them, and what rounding takes "
        "from one update is added to the client's next.",
    )
    min_answers: int = setting(
        1,
        "Accepted answers that a round needs; with fewer it is repeated, then the run stops.",
        low=1,
        high=1_000_000,
    )
    repeats: int = setting(0, "How often a round with too few accepted answers is repeated.", low=0, high=1_000_000)
    norm_limit: float | Literal["auto"] = setting(
        "auto",
        "Longest update (2-norm, experts and router each) that is believed; auto is the farthest that AdamW can "
        "go in the round's steps.",
        low=0.0,
    )
    norm_factor: float = setting(
        10.0, "The same, as a multiple of the median of recent rounds; 0 switches this limit off.", low=0.0
    )
    long_updates: Literal["reject", "clip"] = setting(
        "reject", "What happens to a longer one: refused, or scaled down to the limit."
    )
    rule: Literal["auto", "mean", "clip", "median", "trimmed", "krum", "agreement"] = setting(
        "auto",
        "How updates are averaged, each expert's and the router's: their mean (the paper), or a rule that a few "
        "hostile clients cannot carry away (docs/trust.md); auto is agreement over sites and mean elsewhere.",
    )
    hostile: float = setting(
        0.3,
        "rule=trimmed, krum or agreement: share of the clients that may be hostile; no more are left out.",
        low=0.0,
        high=0.49,
    )
    contested: Literal["keep", "vote"] = setting(
        "vote",
        "rule=agreement: of two experts whose prompts the router cannot tell apart, clients in good standing close "
        "before round 2 the one that answers these worse, by a vote; its buckets then take no part. Or keep both "
        "(docs/trust.md).",
    )
    max_share: float | Literal["auto"] = setting(
        "auto",
        "Most that one client counts in an expert or in the router, as a share; auto is a fifth over sites, whose "
        "numbers of examples are their own claims, and 1 elsewhere.",
        low=0.0,
        high=1.0,
    )
    quarantine: int = setting(
        0,
        "A client whose updates pull against the others' (a cosine below -0.1) in so many rounds in a row is not "
        "asked again, and its buckets of one expert count there no more if only they do; 0: never.",
        low=0,
        high=1_000_000,
    )
    secure_aggregation: bool = setting(
        False,
        "Updates, starts, counts and evaluation sums leave the clients masked: the server sees sums alone, but "
        "signatures are still read one by one (docs/privacy.md).",
    )
    max_samples: int = setting(10_000_000, "Most examples that a client can have.", low=1)
    sites: int = setting(
        0, "Deployment: how many sites must be there before alignment; later ones join.", low=0, high=1_000_000
    )
    deadline: float = setting(
        3600.0, "Seconds that a site has for an answer; a later one does not count.", low=1.0, high=1e8
    )
    patience: float = setting(
        3600.0,
        "Seconds that the server waits for enough sites before it stops; the run can be resumed.",
        low=0.0,
        high=1e8,
    )
    join_distance: float | Literal["auto"] = setting(
        "auto",
        "A late site's bucket joins its nearest expert up to this signature distance and is kept apart beyond it; "
        "auto lies halfway between the experts' own buckets and the nearest other expert.",
        low=0.0,
    )
    fingerprint: str | None = setting(
        None,
        "Deployment: the backbone that sites must have, by the fingerprint that `fedweave site check` prints; "
        "without it the server's own model (federation.test), or the one that federation.sites sites agree on.",
    )
    test: str | None = setting(
        None, "Deployment: a JSONL file on the server to test on; without it the server needs no model."
    )


@dataclass(frozen=True)
class EvaluationConfig:
    """What is measured, and when."""

    every: int = setting(1, "Validate every that many rounds (and after the last).", low=1, high=1_000_000)
    routing: Literal["auto", "sparse", "soft", "top2", "top3", "top4"] = setting(
        "auto", "Routing of the test scores; auto is the method's own: soft for FedLEASE, else sparse."
    )
    selection: Literal["auto", "sparse", "soft", "top2", "top3", "top4"] = setting(
        "auto", "Routing of the validation loss that picks the best round; auto is that of the test."
    )
    compare_routings: bool = setting(False, "Also score and time sparse, top-2 and soft routing of the same model.")
    scores: bool = setting(True, "Score the test set by generation (losses are always measured).")
    score_rounds: bool = setting(False, "Also score the validation answers of every validated round.")
    untouched: bool = setting(True, "Also measure the bare backbone's loss.")
    last: bool = setting(True, "Also test the last round, where the best is an earlier one.")
    rouge: Literal["rouge-score", "paper"] = setting(
        "rouge-score", "ROUGE as the rouge-score package counts it, or as the authors' release does."
    )
    batch_size: int | Literal["auto"] = setting(
        "auto", "Prompts decoded together; auto is 400 on CUDA, 32 on a CPU."
    )
    max_new_tokens: int = setting(64, "Longest answer for tasks that do not set their own.", low=1, high=1_000_000)
    metrics: tuple[str, ...] = setting(
        (),
        "Metrics of own data, one for all or by task, as in sum=number,mood=label (docs/own-data.md).",
        pairs=True,
    )


@dataclass(frozen=True)
class Config:
    """Everything that decides a run."""

    method: str = setting("fedweave", "Federated method; `fedweave list methods` names them.")
    seed: int = setting(42, "Seed of data, partition, initialisation and training.", low=0, high=2**63 - 1)
    output: str | None = setting(None, "Run folder; runs/RECIPE when empty.")
    init: str | None = setting(None, "A bundle whose experts and router the federation starts from.")
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = setting(
        (), "Trackers that get a copy of every figure, as in [tensorboard]; metrics.jsonl is always written."
    )
    finish: tuple[Literal["worth", "report"], ...] = setting(
        (),
        "What follows a finished run, in this order: worth trains its two references, which takes about twice as "
        "long as the run; report writes its page.",
    )
    engine: Literal["in-process", "flower"] = setting(
        "in-process", "Where clients run: in this process, or as Flower nodes, simulated with Ray."
    )
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    data: DataConfig = field(default_factory=DataConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    alignment: AlignmentConfig = field(default_factory=AlignmentConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    living: LivingConfig = field(default_factory=LivingConfig)
    federation: FederationConfig = field(default_factory=FederationConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    attack: AttackConfig = field(default_factory=AttackConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    @property
    def trains_router(self) -> bool:
        """Whether the router learns in the rounds."""
        asked = self.router.training
        return asked == "soft" or (asked == "auto" and self.living.notice == "off")

    @property
    def lives(self) -> bool:
        """Whether rows may change between rounds."""
        return bool(self.data.changes) or self.living.notice != "off"


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Defaults, then the recipe (a name or a YAML file), then ``key.path=value`` overrides."""
    path = find_recipe(recipe)
    tree = read_yaml(read_text(path), str(path))
    for key, value in split_overrides(overrides):
        insert(tree, key, value)
    try:
        return from_tree(tree)
    except UserError:
        _blame(path)
        raise


def _blame(path: Path) -> None:
    """Name the file where the fault is its own and not that of what was typed."""
    try:
        build(Config, read_yaml(read_text(path), str(path)))
    except UserError as fault:
        raise UserError(f"{path}: {fault}") from None


def split_overrides(overrides: Sequence[str]) -> Iterator[tuple[str, object]]:
    """(dotted key, value) of every ``key.path=value``."""
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise UserError(f"override {item!r} is not of the form key=value, as in training.rounds=5.")
        yield key.strip(), read_yaml_value(text, key)


def from_tree(tree: Tree) -> Config:
    """Build and check a config from plain nested dictionaries."""
    config = build(Config, tree)
    check_together(config)
    return config


def find_recipe(recipe: str | Path) -> Path:
    """A packaged recipe by name, or a YAML file by path."""
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UserError(f"there is no config file {path}; `fedweave list recipes` names the built-in ones.")
        return path
    packaged = RECIPES / f"{recipe}.yaml"
    if not packaged.is_file():
        names = recipe_names()
        raise UserError(f"there is no recipe {str(recipe)!r}: {nearest(str(recipe), names)}")
    return packaged


def recipe_names() -> list[str]:
    return sorted(p.stem for p in RECIPES.glob("*.yaml"))


def dump_config(config: Config) -> str:
    return yaml.safe_dump(to_tree(config), sort_keys=False, allow_unicode=True)
