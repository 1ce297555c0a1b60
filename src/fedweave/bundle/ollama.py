"""Modelfiles for Ollama, whose templates are Go's and not Jinja's.

What stands between two messages depends on who spoke before and who speaks now. It is read off rendered
conversations, and written as a Go template only if that gives other conversations exactly as training renders them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from fedweave.backbone.prompts import PromptFormat, RefusedChat
from fedweave.bundle.tokens import begins
from fedweave.data.examples import Message

_WORDS = ("Zeroth", "First", "Second", "Third", "Fourth", "Fifth")  # contents that stand in no template
_TRIALS = ("su", "u", "suau", "uau", "uauau")  # roles by their first letters
_ROLES = {"s": "system", "u": "user", "a": "assistant"}


@dataclass(frozen=True)
class Between:
    """What a rendering writes before, between and behind messages."""

    before_user: str
    before_answer: str
    after_answer: str  # up to the next question
    behind: str  # after the last question: here the model goes on
    before_system: str | None  # None: the template refuses a system prompt
    after_system: str


def modelfile(model: str, adapter: str | None, prompts: PromptFormat, longest: int) -> str:
    """``model`` and ``adapter`` are files beside it."""
    between = read_between(prompts)
    template = go_template(between) if between else "{{ .Prompt }}"
    ends = dict.fromkeys(i for i in (prompts.end_id, prompts.tokenizer.eos_token_id) if i is not None)
    lines = [
        f"FROM ./{model}",
        *([f"ADAPTER ./{adapter}"] if adapter else []),
        f'TEMPLATE """{template}"""',
        *(f'PARAMETER stop "{prompts.tokenizer.convert_ids_to_tokens(i)}"' for i in ends),
        "PARAMETER temperature 0",  # greedy: that is how the model was tested
        f"PARAMETER num_ctx {longest}",
    ]
    return "\n".join(lines) + "\n"


def read_between(prompts: PromptFormat) -> Between | None:
    """None where a rendering does more than write texts between messages, or what a Modelfile cannot hold."""
    tokenizer = prompts.tokenizer
    mark = tokenizer.bos_token if begins(prompts) else ""  # llama.cpp puts that token there itself

    def parts(roles: str) -> list[str]:
        text = prompts.render(_chat(roles))[0].removeprefix(mark)
        for word in _WORDS[: len(roles)]:
            text = text.replace(word, "\0")
        return text.split("\0")

    try:
        before_user, before_answer, after_answer, behind = parts("uau")
    except (ValueError, RefusedChat):
        return None
    try:
        before_system, after_system, _ = parts("su")
    except (ValueError, RefusedChat):
        before_system, after_system = None, ""
    between = Between(before_user, before_answer, after_answer, behind, before_system, after_system)
    literals = [text for field in fields(between) if (text := getattr(between, field.name))]
    if any("{{" in text or '"""' in text or not text.replace("\n", "").isprintable() for text in literals):
        return None
    known = [roles for roles in _TRIALS if before_system is not None or "s" not in roles]
    same = all(
        write(between, _chat(roles)) == prompts.render(_chat(roles))[0].removeprefix(mark) for roles in known
    )
    return between if same else None


def write(between: Between, chat: Sequence[Message]) -> str:
    """A conversation as the Go template renders it."""
    before = {
        ("", "system"): between.before_system or "",
        ("", "user"): between.before_user,
        ("system", "user"): between.after_system,
        ("user", "assistant"): between.before_answer,
        ("assistant", "user"): between.after_answer,
    }
    roles = ["", *(message["role"] for message in chat)]
    spoken = [before[pair] + message["content"] for pair, message in zip(pairwise(roles), chat, strict=True)]
    return "".join(spoken) + between.behind


def go_template(between: Between) -> str:
    """The same in Go; where the last message is an answer, it is gone on with."""
    system = (
        f'{{{{ if eq .Role "system" }}}}{between.before_system}{{{{ .Content }}}}{{{{ else }}}}'
        if between.before_system is not None
        else '{{ if ne .Role "system" }}'
    )
    return (
        '{{ $before := "" }}{{ range .Messages }}' + system + '{{ if eq .Role "user" }}'
        '{{ if eq $before "assistant" }}' + between.after_answer + '{{ else if eq $before "system" }}'
        + (between.after_system if between.before_system is not None else between.before_user)
        + "{{ else }}" + between.before_user + "{{ end }}"
        "{{ .Content }}"
        '{{ else if eq .Role "assistant" }}' + between.before_answer + "{{ .Content }}{{ end }}"
        "{{ end }}{{ $before = .Role }}{{ end }}"
        '{{ if ne $before "assistant" }}' + between.behind + "{{ end }}"
    )  # fmt: skip


def _chat(roles: str) -> tuple[Message, ...]:
    return tuple({"role": _ROLES[r], "content": word} for r, word in zip(roles, _WORDS, strict=False))
