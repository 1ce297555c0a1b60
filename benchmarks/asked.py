"""Who answers what was never trained on: ``python -m benchmarks.asked RUN`` for a run of the built-in sample.

Figures of a finished `fedweave run quickstart`: how many off-topic prompts no expert answers, how many new ones of
the four patterns, and how many with names and things that the sample lacks, by how far ``--doubt`` moves the
limit; and how many two-turn chats that change their task go to the last turn's expert.
"""

import argparse
from itertools import permutations
from pathlib import Path

import fedweave
from fedweave.data.examples import Prompt
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
    "What's a good way to learn the guitar as an adult?",
    "Can you recommend a quiet neighbourhood in Lisbon?",
    "My sourdough starter smells like acetone. Is it dead?",
    "Write a haiku about traffic lights.",
    "What's the difference between TCP and UDP?",
    "Plan a three-day itinerary for Kyoto in spring, with temples and gardens.",
    "Write a Python function that checks whether a string is a palindrome.",
    "Who painted the ceiling of the Sistine Chapel and how long did it take?",
    "How does a heat pump work?",
    "Please write a cover letter for a job as a nurse in a children's hospital. I have five "
    "years of experience and love working in teams.",
    "Give me a recipe for lentil soup.",
    "Was ist der Unterschied zwischen Wetter und Klima?",
    "Explique-moi la photosynthèse en trois phrases.",
    "Turn this into a bulleted list: milk, two onions, flour, and don't forget the stamps.",
    "What are the symptoms of vitamin D deficiency?",
    "Explain the offside rule in football.",
    "Create a workout plan for someone with bad knees.",
    "How many moons does Jupiter have?",
    "Write the opening paragraph of a detective novel that is set in Venice.",
    "Fix this bug: TypeError: 'NoneType' object is not subscriptable. The code is data = "
    "load(); print(data['name'])",
    "What is the best time to plant tulips?",
    "Tell me about the history of the bicycle.",
    "Should I refinance my mortgage now or wait?",
    "Come up with ten names for a black cat.",
    "How do vaccines train the immune system?",
    "Write a limerick about a physicist.",
    "What does the Latin phrase 'carpe diem' mean and who said it?",
    "Make a table of the five largest countries by area with their capitals.",
    "Explain recursion as if I were ten years old.",
    "How can I remove red wine from a white carpet?",
    "What's the plot of Hamlet?",
    "I feel lonely since I moved to a new city. What can I do?",
    "Compose a toast for my sister's wedding.",
    "Write a bash script that deletes all log files older than 30 days.",
    "Why is the sky blue and the sunset red?",
    "Describe the taste of durian to someone who has never had it.",
    "What were the main causes of the First World War?",
    "How do I set up two-factor authentication on my phone?",
    "Solve the differential equation y' = 3y with y(0) = 2.",
    "Who would win in a fight, a bear or a tiger?",
    "Write a tweet that announces our new bakery.",
    "How long does it take to fly from Oslo to Cape Town?",
    "Explain what an options contract is in finance.",
    "Suggest a board game for six people who hate long rules.",
    "What's the etymology of the word 'salary'?",
    "Write HTML for a page with a red button in the middle.",
    "How do I say 'where is the pharmacy' in Japanese?",
    "Give arguments for and against nuclear power.",
    "What should be in a first-aid kit for sailing?",
    "Pretend you are a medieval knight and tell me about your day.",
    "Hi there!",
    "thanks, that was great",
    "What can you do?",
    "2^64 = ?",
    "Who is the president of Brazil?",
    "Summarise: The committee met on Tuesday and agreed to postpone the vote on the new budget "
    "until the auditors have delivered their report, which is expected in late June.",
    "Which programming language should I learn first, and why?",
    "Write an SQL statement that creates a table of customers.",
    "How do birds find their way when they migrate?",
    "Bitte übersetze ins Englische: Der Zug hat heute leider Verspätung.",
]


NEW_NAMES = [
    "Mia has 3 hats and finds 4 more. How many hats in all?",
    "Anna has 5 apples and finds 2 more. How many apples in all?",
    "Priya has 12 stamps and finds 9 more. How many stamps in all?",
    "Wolfgang has 7 umbrellas and finds 6 more. How many umbrellas in all?",
    "Chidi has 20 bricks and finds 11 more. How many bricks in all?",
    "Fix the grammar: Ada go to school.",
    "Fix the grammar: Mia go to the museum on Friday.",
    "Fix the grammar: Anna go to the office on Tuesday.",
    "Fix the grammar: Priya go to the harbour on Sunday.",
    "Fix the grammar: Wolfgang go to the bakery on Monday.",
    "Pick the fruit from this list: saw, plum, tram.",
    "Pick the animal from this list: mango, otter, ladder.",
    "Pick the colour from this list: purple, spoon, wolf.",
    "Pick the tool from this list: drill, cherry, pink.",
    "Pick the fruit from this list: papaya, bus, chisel.",
    "Review: The bread was really stale! That is all.\nMood of the review, one word:",
    "Review: The museum was quite lovely! That is all.\nMood of the review, one word:",
    "Review: The pizza was truly awful! That is all.\nMood of the review, one word:",
    "Review: The lesson was really helpful! That is all.\nMood of the review, one word:",
    "Review: The train was quite dirty! That is all.\nMood of the review, one word:",
]


def doubts(model: FedWeaveModel, prompts: list[Prompt]) -> list[float]:
    encoded = model.backbone.prompts.encode_prompts(prompts)
    found = [doubt for doubt in model.judge(encoded)[1] if doubt is not None]
    if len(found) < len(prompts):
        raise SystemExit("this run learned no limit: router.familiar is 1")
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
    asked: dict[str, list[Prompt]] = {
        "off-topic": [*OFF_TOPIC], "new": [row.prompt for row in rows], "with new names": [*NEW_NAMES],
    }  # fmt: skip
    found = {name: doubts(model, prompts) for name, prompts in asked.items()}
    print("  prompts without an expert\n  doubt" + "".join(f"{name:>18}" for name in found))
    for limit in (0.67, 1.0, 1.25, 1.5, 2.0):
        beyond = [f"{sum(doubt > limit for doubt in some)} of {len(some)}" for some in found.values()]
        print(f"  {limit:5.2f}" + "".join(f"{told:>18}" for told in beyond))
    pairs = [
        (first, then)
        for one, other in permutations(pools, 2)
        for first, then in zip(pools[one][:5], pools[other][5:10], strict=True)
    ]
    chats: list[Prompt] = [
        tuple({"role": role, "content": str(text)} for role, text in
              (("user", a.prompt), ("assistant", a.response), ("user", b.prompt)))
        for a, b in pairs
    ]  # fmt: skip
    alone, spoken = model.route([b.prompt for _, b in pairs]), model.route(chats)
    same = (alone.argmax(1) == spoken.argmax(1)).sum()
    print(f"chats that change their task and get the last turn's expert: {same} of {len(chats)}")


if __name__ == "__main__":
    main()
