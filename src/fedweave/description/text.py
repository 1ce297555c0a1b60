"""Experts in words: for a terminal, and in one line for tables and cards."""

from fedweave.description.record import Expert, Experts, title


def experts_text(found: Experts) -> str:
    """Everything that is known, for a terminal."""
    parts = [f"{len(found['experts'])} experts of round {found['round']}, by {found['source']}"]
    for m, expert in enumerate(found["experts"]):
        lines = [f"{title(found, m)}: {expert['share']:.0%} of the prompts"]
        lines.append(f"  words    {', '.join(words_of(found, expert))}")
        for label, counts in (("clients", expert.get("clients")), ("labels", expert.get("tasks"))):
            if counts:
                lines.append(f"  {label:7}  {shares(counts)}")
        for prompt in expert.get("typical", []):
            lines.append(f"  typical  {short(prompt)}")
        for example in expert.get("examples", []):
            lines += [
                f"  asked    {short(example['prompt'])}",
                f"    bare     {short(example['bare'])}",
                f"    expert   {short(example['answer'])}",
                f"    wanted   {short(example['reference'])}",
            ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def words_of(found: Experts, expert: Expert) -> list[str]:
    """Its words, or why there are none."""
    if len(found["experts"]) == 1:
        return ["there is one expert, and none to set it apart from"]
    return expert["words"] or ["none stand out" if expert["share"] else "it gets none of these prompts"]


def shares(counts: dict[str, int], most: int = 6) -> str:
    """north 60 %, south 40 %; the largest first, the rest together."""
    total = sum(counts.values())
    listed = list(counts.items())
    said = [f"{name} {count / total:.0%}" for name, count in listed[:most]]
    rest = sum(count for _, count in listed[most:])
    return ", ".join([*said, *([f"{len(listed) - most} others {rest / total:.0%}"] if rest else [])])


def summary(expert: Expert) -> str:
    """In one line: its name or its words."""
    return expert["name"] or ", ".join(expert["words"][:5])


def short(text: str, most: int = 160) -> str:
    """One line of a text; not every script has blanks to cut at."""
    line = " ".join(text.split())
    return (line if len(line) <= most else f"{line[: most - 2].rstrip()} …") or "(nothing)"
