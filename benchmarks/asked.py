"""Who answers what was never trained on: ``python -m benchmarks.asked RUN`` for a run of the built-in sample.

Three figures of a finished `fedweave run quickstart router.familiar=0.98`: how many off-topic prompts no expert
answers, how many new prompts of the four patterns are taken for strange by mistake, both by how far ``--doubt``
moves the limit, and how many two-turn chats that change their task go to the last turn's expert.
"""

import argparse
from itertools import permutations
from pathlib import Path

import fedweave
from fedweave.data.sample import make_sample
from fedweave.inference.model import FedWeaveModel

OFF_TOPIC = [
    "Explain federated learning to a child.",
    "Write a short poem about the sea in autumn.",
    "What is the capital of Mongolia, and how many people live there?",
    "Translate into French: the train leaves at noon.",
    "def quicksort(xs): complete this function in Python.",
    "Give me three tips for repairing a bicycle tyre.",
    "Why did the Roman republic end?",
    "Summarise the plot of Moby-Dick in two sentences.",
    "How do I boil an egg so that the yolk stays soft?",
    "SELECT name FROM users WHERE: finish the query for users older than 30.",
    "List the planets in the order of their distance from the sun.",
    "Draft an e-mail that asks my landlord to mend the heating.",
    "What does the second law of thermodynamics say?",
    "Tell me a joke about a penguin and a lawyer.",
    "Which side effects does ibuprofen have?",
    "Continue the story: The lighthouse keeper had not slept for three days when",
    "Compare Keynesian and monetarist views on inflation.",
    "Generate a regular expression for e-mail addresses.",
    "What should I wear for a hike in the Alps in May?",
    "Describe how a transformer model computes attention.",
    "Schreibe ein kurzes Gedicht über den Regen.",
    "¿Cuál es la diferencia entre ser y estar?",
    "Name five novels by women from the nineteenth century.",
    "Prove that the square root of two is irrational.",
    "How can I calm a dog that is afraid of thunder?",
    "Rewrite this sentence in the style of a pirate: please close the door.",
    "What happened in Berlin on the ninth of November 1989?",
    "Suggest a name for a bakery next to a river.",
    "Is it legal to record a telephone call in California?",
    "Convert 72 degrees Fahrenheit to Celsius and show the formula.",
]


def doubts(model: FedWeaveModel, prompts: list[str]) -> list[float]:
    encoded = model.backbone.prompts.encode_prompts(prompts)
    found = [doubt for doubt in model.judge(encoded)[1] if doubt is not None]
    if len(found) < len(prompts):
        raise SystemExit("this run learned no limit; train with router.familiar below 1")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backbone")
    parser.add_argument("--each", type=int, default=25, help="new prompts of each pattern")
    arguments = parser.parse_args()
    model = fedweave.load(arguments.folder, model=arguments.backbone)
    pools, _ = make_sample(arguments.each, seed=977)
    rows = [row for pool in pools.values() for row in pool]
    strange, known = doubts(model, OFF_TOPIC), doubts(model, [row.prompt for row in rows])
    print("  doubt  off-topic without an expert  new prompts of the patterns without an expert")
    for limit in (1.0, 1.25, 1.5, 2.0, 3.0):
        found, wrong = (sum(doubt > limit for doubt in some) for some in (strange, known))
        print(f"  {limit:5.2f}  {found:>8} of {len(strange)}  {wrong:>20} of {len(known)}")
    pairs = [
        (first, then)
        for one, other in permutations(pools, 2)
        for first, then in zip(pools[one][:5], pools[other][5:10], strict=True)
    ]
    chats = [
        tuple({"role": role, "content": text} for role, text in
              (("user", a.prompt), ("assistant", a.response), ("user", b.prompt)))
        for a, b in pairs
    ]  # fmt: skip
    alone, spoken = model.route([b.prompt for _, b in pairs]), model.route(chats)
    same = (alone.argmax(1) == spoken.argmax(1)).sum()
    print(f"chats that change their task and get the last turn's expert: {same} of {len(chats)}")


if __name__ == "__main__":
    main()
