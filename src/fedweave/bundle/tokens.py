"""The tokenizer that goes with a model, whose chat template renders a prompt as training did.

Other programs render chats by the tokenizer's template. Where a model was trained on plain prompts, the backbone's
own template would put words around them that the experts never saw.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

from fedweave.backbone.prompts import RESPONSE, SPEAKERS, PromptFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MARKS = "".join(f"{{% elif m['role'] == '{role}' %}}{{{{ '{mark}' }}}}" for role, mark in SPEAKERS.items() if mark)
# What prompts.write_plain does, in Jinja; a last answer is a row as it was trained on, with its end.
PLAIN_TEMPLATE = (
    "{% for m in messages %}"
    "{% if not loop.first %}{{ '\\n\\n' }}{% endif %}"
    "{% if loop.first and m['role'] == 'system' %}" + _MARKS + "{% endif %}"
    "{{ m['content'].rstrip() if loop.last else m['content'] }}"
    "{% if loop.last and m['role'] == 'assistant' and not add_generation_prompt %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ " + repr(RESPONSE) + " }}{% endif %}"
)
_TRIALS = ("Fix the grammar: Ada go to school.", "3 + 4?\n\nThink.")


def write_tokenizer(folder: Path, prompts: PromptFormat) -> bool:
    """The tokenizer with the template of training; whether it has one."""
    tokenizer = with_template(prompts)
    tokenizer.save_pretrained(folder)
    return tokenizer.chat_template is not None


def with_template(prompts: PromptFormat) -> PreTrainedTokenizerFast:
    """A copy of the tokenizer with the template of training. One for which no template gives training's own tokens
    gets none: better no chat than another one."""
    tokenizer = copy.deepcopy(prompts.tokenizer)
    if prompts.kind == "plain":
        tokenizer.chat_template = ("{{ bos_token }}" if begins(prompts) else "") + PLAIN_TEMPLATE
        if not all(_same(tokenizer, prompts, text) for text in _TRIALS):
            tokenizer.chat_template = None
    return tokenizer


def begins(prompts: PromptFormat) -> bool:
    """Whether a prompt's first token is the tokenizer's mark for it."""
    bos = prompts.tokenizer.bos_token_id
    return bos is not None and int(prompts.encode_prompts(["a"])[0].ids[0]) == bos


def _same(tokenizer: PreTrainedTokenizerFast, prompts: PromptFormat, text: str) -> bool:
    turns = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    return list(ids) == prompts.encode_raw(prompts.render(text)[0]).ids.tolist()
