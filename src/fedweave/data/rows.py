"""A row of a user's becomes an example: the formats that people have, and a map for those that they made up.

Known without a map:

    prompt, response                         prompt, completion
    instruction, input, output (Alpaca)      messages (OpenAI, also with content parts)
    conversations (ShareGPT: from, value)

Each may have ``system``, ``task`` and ``client``. ``data.fields`` names other columns: prompt=question,client=site.
"""

import reprlib
from collections.abc import Sequence

from fedweave.data.examples import Example, Message, Prompt
from fedweave.data.files import Row
from fedweave.errors import UserError, nearest

UNLABELLED = "all"
FIELDS = ("prompt", "input", "response", "system", "messages", "task", "client")
ROLES = ("system", "user", "assistant", "tool")
# Roles as other formats call them.
ROLE_NAMES = {
    **{role: role for role in ROLES},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant"},
    **{"developer": "system", "function": "tool", "observation": "tool"},
}
RESERVED = ("macro",)  # names of rows in every table
LONGEST_NAME = 80
KNOWN = "'prompt' and 'response' (or 'completion'), 'instruction' and 'output', 'messages' or 'conversations'"


class Fields(dict[str, str]):
    """{what: column}, and the setting that says so: a site has one in its own file."""

    key = "data.fields"


def read_fields(pairs: Sequence[str], key: str = Fields.key) -> Fields:
    fields = Fields()
    fields.key = key
    for pair in pairs:
        what, equals, column = pair.partition("=")
        if not equals and what not in FIELDS:
            raise UserError(f"{key}: {pair!r} does not say what it holds; write prompt={pair}, for example.")
        if what not in FIELDS:
            raise UserError(f"{key}: {what!r} is nothing that a row has: {nearest(what, FIELDS)}")
        if not equals or not column:
            raise UserError(f"{key}: {pair!r} names no column; write {what}=COLUMN.")
        fields[what] = column
    if "messages" in fields and "prompt" in fields:
        raise UserError(f"{key}: a row has either messages or prompt and response, not both.")
    return fields


def to_example(row: Row, where: str, fields: Fields) -> Example:
    """The example that a row holds, or a UserError that says what is wrong with it."""
    task = _label(row, "task", where, fields) or UNLABELLED
    if task in RESERVED:
        raise UserError(f"{where}: no task can be called {task!r}, which is the name of the average; rename it.")
    chat = _chat(row, where, fields)
    if chat is not None:
        prompt, response = _split(chat, where)
        return Example(prompt, response, task, where)
    ask, answer = _columns(row, where, fields)
    return Example(_asked(row, ask, where, fields), _text(row, answer, where), task, where)


def to_prompt(row: Row, where: str, fields: Fields) -> Prompt:
    """What a row asks. An answer that stands in it, as in rows to learn from, is left aside."""
    chat = _chat(row, where, fields, fewest=1)
    if chat is not None:
        asked = chat[:-1] if chat[-1]["role"] == "assistant" else chat
        if not any(m["role"] == "user" and m["content"].strip() for m in asked):
            raise UserError(f"{where}: there is no user message to answer, or it is empty.")
        return tuple(asked)
    ask = _ask(row, fields)
    if ask not in row:
        raise UserError(
            f"{where}: no {ask!r}; a row to answer needs 'prompt' or 'messages' (it has {_listed(row)})."
        )
    return _asked(row, ask, where, fields)


def _asked(row: Row, ask: str, where: str, fields: Fields) -> Prompt:
    """The prompt of a row without turns: its text, what is added to it, and the system prompt before it."""
    words = _text(row, ask, where)
    more = fields.get("input", "input" if ask == "instruction" else None)
    if more and _optional(row, more, where):
        words = f"{words}\n\n{row[more]}"
    system = _optional(row, fields.get("system", "system"), where)
    return with_system(system, words) if system else words


def with_system(system: str, prompt: Prompt) -> Prompt:
    """The prompt behind a system message, unless it has one."""
    turns = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
    return turns if turns[0]["role"] == "system" else ({"role": "system", "content": system}, *turns)


def is_name(text: str) -> bool:
    """Whether a table, a file and a terminal can show it."""
    return 0 < len(text) <= LONGEST_NAME and text.isprintable()


def client_of(row: Row, where: str, fields: Fields) -> str | None:
    """Whose row it is, where it says so."""
    name = _label(row, "client", where, fields)
    if name is None and "client" in fields:
        raise UserError(
            f"{where}: {fields['client']!r} says of no client; {fields.key} names it as the client's column."
        )
    return name


# ---------------------------------------------------------------------------------- texts


def _ask(row: Row, fields: Fields) -> str:
    return fields.get("prompt") or ("instruction" if "instruction" in row and "prompt" not in row else "prompt")


def _columns(row: Row, where: str, fields: Fields) -> tuple[str, str]:
    """The names of the columns that ask and answer."""
    ask = _ask(row, fields)
    likely = ("output", "response") if ask == "instruction" else ("response", "completion")
    answer = fields.get("response") or next((name for name in likely if name in row), likely[0])
    for what, name in (("prompt", ask), ("response", answer)):
        if name not in row and what in fields:
            raise _misnamed(row, what, where, fields)
        if name not in row:
            raise UserError(
                f"{where}: no {name!r}; a row needs {KNOWN}, or {fields.key} names its columns, as in "
                f"prompt=question,response=answer (it has {_listed(row)})."
            )
    return ask, answer


def _misnamed(row: Row, what: str, where: str, fields: Fields) -> UserError:
    return UserError(f"{where}: no {fields[what]!r}, which {fields.key} names for {what} (it has {_listed(row)}).")


def _text(row: Row, name: str, where: str) -> str:
    value = row[name]
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: {name!r} must be a non-empty text, not {reprlib.repr(value)}.")
    return value


def _optional(row: Row, name: str, where: str) -> str | None:
    value = row.get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    return _text(row, name, where)


def _label(row: Row, what: str, where: str, fields: Fields) -> str | None:
    """A short name in a column of its own; None where the column is not there, or empty in a table."""
    column = fields.get(what, what)
    if column not in row and what in fields:
        raise _misnamed(row, what, where, fields)
    value = row.get(column)
    if value is None:
        return None
    if what == "client" and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise UserError(
            f"{where}: {column!r} must be a non-empty text, not {reprlib.repr(value)}; leave it out if unknown."
        )
    if not is_name(value):
        raise UserError(
            f"{where}: {column!r} must be a name of at most {LONGEST_NAME} printable characters, not "
            f"{reprlib.repr(value)}."
        )
    return value


def _listed(row: Row) -> str:
    names = [reprlib.repr(name) for name in row]
    return ", ".join([*names[:12], *(["…"] if len(names) > 12 else [])]) or "no keys"


# ---------------------------------------------------------------------------------- chats


def _chat(row: Row, where: str, fields: Fields, fewest: int = 2) -> list[Message] | None:
    """The messages of a chat row, at least so many; None where the row is none."""
    if "messages" in fields or not {"prompt", "response"} & set(fields):
        known = [fields["messages"]] if "messages" in fields else ["messages", "conversations"]
        name = next((name for name in known if row.get(name) is not None), None)
        if name is not None:
            messages = _messages(row[name], name, where, fewest)
            system = _optional(row, fields.get("system", "system"), where)
            if system and messages[0]["role"] != "system":
                messages = [{"role": "system", "content": system}, *messages]
            return messages
        if "messages" in fields:
            raise UserError(
                f"{where}: no {known[0]!r}, which {fields.key} names for messages (it has {_listed(row)})."
            )
    if isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list):  # TRL's chats
        return [m for name in ("prompt", "completion") for m in _messages(row[name], name, where, 1)]
    if fewest == 1 and isinstance(row.get("prompt"), list):
        return _messages(row["prompt"], "prompt", where, 1)
    return None


def _messages(messages: object, name: str, where: str, fewest: int = 2) -> list[Message]:
    if not isinstance(messages, list) or len(messages) < fewest:
        least = "a user's and an assistant's message" if fewest > 1 else "one message"
        raise UserError(f"{where}: {name!r} must list at least {least}.")
    return [_message(m, where) for m in messages]


def _message(message: object, where: str) -> Message:
    """One turn, in our words for roles and with its parts joined."""
    turn = message if isinstance(message, dict) else {}
    role, content = (turn.get(ours, turn.get(theirs)) for ours, theirs in (("role", "from"), ("content", "value")))
    if isinstance(content, list):
        content = _parts(content, where)
    if not isinstance(role, str) or role not in ROLE_NAMES or not isinstance(content, str):
        raise UserError(f"{where}: a message needs 'role' (one of {', '.join(ROLES)}) and 'content', a text.")
    return {"role": ROLE_NAMES[role], "content": content}


def _parts(parts: list[object], where: str) -> str:
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or kind not in ("text", "input_text", "output_text"):
            raise UserError(f"{where}: a content part is {reprlib.repr(kind)}, and only text can be learned.")
        texts.append(text)
    return "".join(texts)


def _split(messages: list[Message], where: str) -> tuple[Prompt, str]:
    """A chat's prompt and answer: the last message is the assistant's, everything before it the prompt."""
    *prompt, last = messages
    if last["role"] != "assistant" or not last["content"].strip():
        raise UserError(f"{where}: the last message must be the assistant's non-empty answer.")
    asked = [m["content"] for m in prompt if m["role"] == "user"]
    if not asked or not all(text.strip() for text in asked):
        raise UserError(f"{where}: there is no user message before the answer, or it is empty.")
    return tuple(prompt), last["content"]
