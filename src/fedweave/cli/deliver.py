"""Verbs that hand a model on: export, push, serve."""

import argparse
import os
from functools import partial
from pathlib import Path

from fedweave.cli.verbs import Verbs, shared
from fedweave.console import Console
from fedweave.description.record import LEVELS
from fedweave.errors import UserError

MAX_ANSWER = 512  # tokens that `serve` gives an answer where nobody says


def register(verbs: Verbs) -> None:
    export = verbs.add("export", _export, "Write a run's model as a bundle of PEFT adapters and a router.")
    export.add_argument("folder", type=Path, help="the run folder; for all but a bundle also a bundle")
    export.add_argument("target", type=Path, help="a new folder")
    form = export.add_mutually_exclusive_group()
    form.add_argument("--merge", type=int, metavar="K", help="instead: a dense model with expert K in its weights")
    form.add_argument(
        "--soft",
        metavar="WEIGHTS",
        help="instead: one adapter for a fixed mixture, as in 0.5,0.3,0.2",
    )
    export.add_argument(
        "--format",
        choices=["peft", "gguf", "mlx"],
        default="peft",
        help="gguf: backbone and experts for llama.cpp and Ollama, with --merge K one model; mlx: for mlx_lm",
    )
    export.add_argument(
        "--quantise",
        metavar="TYPE",
        help="with --format gguf: how weights are kept, as F32, F16, BF16, Q8_0 (default), Q5_1 or Q4_0",
    )
    telling(export, "the bundle and its card tell")
    export.add_argument(
        "--base-model", metavar="NAME", help="what others call the backbone, as owner/name (for the card and PEFT)"
    )
    shared(export, "--backbone", "--doubt", "--last", "--checkpoint")
    push = verbs.add("push", _push, "Upload a bundle to a repository of the Hugging Face hub.")
    push.add_argument("bundle", type=Path, help="the bundle's folder")
    push.add_argument("repository", help="owner/name; made when it does not exist")
    push.add_argument("--private", action="store_true", help="make the repository private")
    serve = verbs.add("serve", _serve, "Serve a model over HTTP, as OpenAI clients expect it.")
    serve.add_argument("folder", type=Path, help="a bundle or a run folder")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    serve.add_argument("--api-key", help="clients must send it (default: the environment's FEDWEAVE_API_KEY)")
    serve.add_argument("--max-batch", type=int, default=32, help="answers under way at a time")
    serve.add_argument("--max-queue", type=int, default=256, help="requests that may wait; more are told to retry")
    serve.add_argument(
        "--max-new-tokens",
        type=int,
        help=f"longest answer (default: {MAX_ANSWER}, less where the model has no room for it)",
    )
    serve.add_argument(
        "--max-prompt",
        type=int,
        metavar="TOKENS",
        help="longest prompt (default: the model's own length, up to 8192)",
    )
    serve.add_argument("--max-body", type=int, default=1 << 20, metavar="BYTES", help="largest request")
    serve.add_argument(
        "--upstream", metavar="URL", help="only route, and let this server answer, which has the experts"
    )
    serve.add_argument(
        "--upstream-kind",
        choices=["vllm", "sglang", "llama"],
        default="vllm",
        help="how it takes an expert: as the model's name (vLLM, fedweave), as lora_path (SGLang), or as a file's "
        "number (llama-server)",
    )
    serve.add_argument("--upstream-key", help="its key (default: the environment's FEDWEAVE_UPSTREAM_KEY)")
    shared(serve, "--backbone", "--doubt")
    serve.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    telling(serve, "the page of a served run tells (a bundle's: what it was exported with)")
    shared(serve, "--last", "--checkpoint")


def telling(parser: argparse.ArgumentParser, who: str) -> None:
    parser.add_argument(
        "--describe",
        choices=LEVELS,
        help=f"what {who} of each expert: words that set its prompts apart, or also prompts and answers from it",
    )


def _weights(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--soft {text!r} is not a list of weights, as in 0.5,0.3,0.2.") from None


def _export(arguments: argparse.Namespace, console: Console) -> None:
    from fedweave.bundle.export import write_merged, write_soft
    from fedweave.bundle.programs import check_quantisation, write_gguf, write_mlx
    from fedweave.runs.use import export_as, export_run

    source, target, which = arguments.folder, arguments.target, (arguments.last, arguments.checkpoint)
    form, merged = arguments.format, arguments.merge
    if form != "peft" or merged is not None or arguments.soft is not None:
        for name in ("describe", "doubt"):
            if getattr(arguments, name) is not None:
                raise UserError(f"--{name} is for bundles: what is written here has no router.")
    if arguments.quantise is not None and form != "gguf":
        raise UserError("--quantise has no effect without --format gguf.")
    if form != "peft" and (arguments.soft is not None or (form == "mlx" and merged is not None)):
        raise UserError(
            f"--format {form} writes experts{' or --merge K' if form == 'gguf' else ''}; leave the rest."
        )
    names = {"model": arguments.backbone, "base": arguments.base_model}
    if form == "gguf":
        kind = check_quantisation(arguments.quantise or "Q8_0")
        export_as(partial(write_gguf, quantisation=kind, expert=merged), source, target, *which, **names)
        what = (
            "the backbone and a LoRA file for each adapter" if merged is None else f"a model with expert {merged}"
        )
        console.say(f"{target}: {what} ({kind}), with Modelfiles; read back, they hold what was trained.")
    elif form == "mlx":
        export_as(write_mlx, source, target, *which, **names)
        console.say(f"{target}: adapters for mlx_lm.")
    elif merged is not None:
        export_as(partial(write_merged, expert=merged), source, target, *which, **names)
        console.say(f"{target}: a dense model with expert {merged}; its logits are those of the expert.")
    elif arguments.soft is not None:
        export_as(partial(write_soft, weights=_weights(arguments.soft)), source, target, *which, **names)
        console.say(f"{target}: one adapter for the mixture; PEFT gives the same logits with it.")
    else:
        written = export_run(source, target, *which, arguments.describe, **names, doubt=arguments.doubt)
        if "/" not in written.get("base_model", ""):
            console.warn("the card cannot say where others find the backbone; --base-model owner/name would.")
        experts, rounds = written["experts"], written["round"]
        router = ", and their router" if written["router"] else ""
        console.say(f"{target}: {experts} experts of round {rounds}{router}; PEFT gives the same logits with each.")


def _push(arguments: argparse.Namespace, console: Console) -> None:
    from fedweave.bundle.hub import push_bundle

    console.say(f"pushed to {push_bundle(arguments.bundle, arguments.repository, arguments.private)}")


def _serve(arguments: argparse.Namespace, console: Console) -> None:
    from fedweave.runs.use import load, told_experts

    try:
        from fedweave.serving.jobs import Limits
        from fedweave.serving.server import ServerSettings, serve
    except ImportError as error:
        raise UserError(f"serving needs {error.name}; install it with `pip install 'fedweave[serve]'`.") from None

    for name in ("max_batch", "max_new_tokens", "max_body", "max_prompt"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1.")
    if arguments.max_queue < 0:
        raise UserError("--max-queue must not be negative.")
    if arguments.upstream and not arguments.upstream.startswith(("http://", "https://")):
        raise UserError(f"--upstream {arguments.upstream}: an address starts with http:// or https://.")
    settings = ServerSettings(
        host=arguments.host,
        port=arguments.port,
        key=arguments.api_key or os.environ.get("FEDWEAVE_API_KEY"),
        upstream=arguments.upstream,
        upstream_kind=arguments.upstream_kind,
        upstream_key=arguments.upstream_key or os.environ.get("FEDWEAVE_UPSTREAM_KEY"),
        told=told_experts(arguments.folder, arguments.describe),
    )
    limits = Limits(
        arguments.max_batch,
        arguments.max_queue,
        arguments.max_new_tokens or MAX_ANSWER,
        arguments.max_body,
        arguments.max_prompt,
        yields=arguments.max_new_tokens is None,
    )
    where = {"last": arguments.last, "checkpoint": arguments.checkpoint, "device": arguments.device}
    where |= {"model": arguments.backbone, "doubt": arguments.doubt}
    serve(lambda: load(arguments.folder, **where), settings, limits, console)
