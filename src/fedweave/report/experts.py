"""The chapter that says what each expert is."""

from fedweave.description.record import read_experts, title
from fedweave.description.text import shares, words_of
from fedweave.report.parts import Section
from fedweave.runs.reading import RunRecord


def what_experts_are(lead: RunRecord) -> Section:
    section = Section("described", "What each expert is")
    found = read_experts(lead.path)
    if found is None:
        given = " --data FILE" if lead.elsewhere else ""
        section.lacks(
            lead.discovery is not None, f"what each expert is: fedweave describe {lead.path}{given} finds out."
        )
        return section
    section.intro = (
        f"By the router's choice for {found['source']}, round {found['round']}. Words are those that an expert's "
        "prompts hold and the others' do not; no label is used. The page has prompts: think before you pass it on."
    )
    for m, expert in enumerate(found["experts"]):
        facts = [
            (what, shares(counts))
            for what, counts in (("clients", expert.get("clients")), ("labels", expert.get("tasks")))
            if counts
        ]
        said = {"title": title(found, m), "share": f"{expert['share']:.0%}", "words": words_of(found, expert)}
        section.experts.append({**expert, **said, "facts": facts})
    names = all(expert["name"] for expert in found["experts"])
    section.lacks(not names, f"names of your own: fedweave describe {lead.path} --name 0=NAME gives them.")
    return section
