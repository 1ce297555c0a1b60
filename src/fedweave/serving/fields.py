"""Fields of a request that are not acted on: taken where they change nothing, refused where they would."""

from collections.abc import Mapping, Sequence

from fedweave.errors import UserError, nearest

# Whatever their value, the answer is the same.
LABELS = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "request_id",
    "priority",
)

# Known to OpenAI's or vLLM's clients and not offered here, with the values (besides null) that ask for nothing.
IDLE: dict[str, Sequence[object]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False), "functions": ([],),
    "function_call": ("none", "auto"), "logit_bias": ({},), "best_of": (1,), "suffix": ("",), "audio": (),
    "modalities": (["text"],), "prediction": (), "reasoning_effort": ("none",), "verbosity": ("medium",),
    "web_search_options": (), "ignore_eos": (False,), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "guided_grammar": (), "structured_outputs": (), "chat_template": (), "chat_template_kwargs": ({},),
    "continue_final_message": (False,), "add_generation_prompt": (True,), "add_special_tokens": (True,),
    "documents": ([],), "truncate_prompt_tokens": (-1,), "skip_special_tokens": (True,), "prompt_logprobs": (),
    "spaces_between_special_tokens": (True,), "include_stop_str_in_output": (False,), "length_penalty": (1,),
    "use_beam_search": (False,), "bad_words": ([],), "allowed_token_ids": (), "lora_path": (),
}  # fmt: skip


def check_fields(given: Mapping[str, object], known: Sequence[str]) -> None:
    """``given`` are the fields beyond those ``known``; one sentence for the first that may not be passed over."""
    for name, value in given.items():
        if name in LABELS:
            continue
        if name not in IDLE:
            raise UserError(f"{name}: there is no such field: {nearest(name, [*known, *LABELS, *IDLE])}")
        if value is not None and not any(value == idle and type(value) is type(idle) for idle in IDLE[name]):
            raise UserError(f"{name}: not offered by this server.")
