"""Prompts of the error-rate bench: many kinds of short tasks, no prompt twice.

Each template is filled with drawn numbers and words, so that every group of a set has a prompt of its own.
"""

from __future__ import annotations

import numpy as np

NAMES = ("Ada", "Omar", "Lena", "Ravi", "Mei", "Jonas", "Sofia", "Tariq", "Ines", "Bo", "Nadia", "Felix")
THINGS = ("apples", "books", "coins", "stamps", "lamps", "tickets", "shells", "pencils", "kites", "bolts")
PLACES = (
    "a harbour",
    "a small library",
    "the desert",
    "a night train",
    "an old mill",
    "a market",
    "the moon",
)
TOPICS = (
    "photosynthesis",
    "the water cycle",
    "how a lock works",
    "gravity",
    "sleep",
    "baking bread",
    "the French Revolution",
    "prime numbers",
    "coral reefs",
    "electric motors",
    "chess openings",
    "volcanoes",
)

TEMPLATES = (
    "What is {a}+{b}? Explain.",
    "Compute {a} times {b}. Show the steps.",
    "What is {a} minus {b}? Reply with only the number.",
    "{name} has {a} {thing} and gives away {b}. How many are left?",
    "{name} buys {a} {thing} for {b} coins each. What is the total price?",
    "Is {a} a prime number? Say why.",
    "Write the number {a} in words.",
    "List three numbers between {a} and {c}.",
    "Which is larger, {a} or {b}? Answer in a sentence.",
    "Round {a} to the nearest hundred and explain.",
    "Write a short story about {name} in {place}.",
    "Write a short story that has {a} {thing} in it.",
    "Write the first line of a novel set in {place}.",
    "Describe {place} at dawn in two sentences.",
    "Write a poem of four lines about {topic}.",
    "Write a haiku about {thing}.",
    "Explain {topic} to a child of {d}.",
    "Explain {topic} in one sentence.",
    "Give {d} facts about {topic}.",
    "Ask {d} quiz questions about {topic}.",
    "Why is {topic} important?",
    "What would happen without {topic}?",
    "Name {d} books that someone interested in {topic} could read.",
    "Plan a lesson of {a} minutes about {topic}.",
    "Write an e-mail in which {name} orders {a} {thing}.",
    "Write an apology from {name} who lost {a} {thing}.",
    "Write a dialogue between {name} and {other} about {topic}.",
    "Write a dialogue between {name} and a seller of {thing}.",
    "{name} travels {a} km in {d} hours. What is the speed?",
    "A box holds {d} {thing}. How many boxes are needed for {a}?",
    "Convert {a} minutes to hours and minutes.",
    "Convert {a} centimetres to metres.",
    "What is {d} percent of {a}?",
    "Half of {a} {thing} are red. How many are not?",
    "Count backwards from {d} to 1.",
    "Sort these numbers: {a}, {b}, {c}, {d}.",
    "What comes next: {d}, {e}, ...? Explain.",
    "Give the sum of the digits of {a}.",
    "Write a Python function that adds {a} to its argument.",
    "Write a Python loop that prints the first {d} squares.",
    "Write an SQL query for all {thing} that cost more than {a}.",
    "Explain what a variable is, with the value {a} as an example.",
    "Suggest {d} names for a shop that sells {thing}.",
    "Write an advertisement for {thing}.",
    "Write a review of {place} by {name}.",
    "Give {name} advice on learning {topic}.",
    "Make a shopping list for {d} guests.",
    "Give a recipe for {d} people with beans.",
    "Translate into French: I have {a} {thing}.",
    "Translate into Spanish: {name} lives near {place}.",
    "Correct the grammar: {name} have {a} {thing} yesterday.",
    "Rewrite politely: give me the {thing}, {name}.",
    "Summarise in five words: {name} sold {a} {thing} and moved to {place}.",
    "Is this true: every year has {a} days? Explain.",
    "What rhymes with {thing}?",
    "Give the opposite of each word: hot, early, {thing}.",
    "Invent a proverb about {thing}.",
    "Tell a joke about {thing}.",
    "Describe {name}, who collects {thing}, in {d} sentences.",
    "What would {name} see in {place}?",
    "Write a diary entry of {name} on day {a} in {place}.",
    "Who might need {a} {thing}, and why?",
)


def task_texts(label: str, count: int) -> list[str]:
    """`count` different prompts, drawn from the label: the same label gives the same ones, more or fewer."""
    draw = np.random.default_rng(list(label.encode()))
    texts: dict[str, None] = {}
    while len(texts) < count:
        template = TEMPLATES[int(draw.integers(len(TEMPLATES)))]
        low, step = int(draw.integers(2, 10)), int(draw.integers(2, 9))
        first, second = (int(n) for n in draw.integers(11, 999, 2))
        text = template.format(
            a=max(first, second),
            b=min(first, second),
            c=max(first, second) + int(draw.integers(10, 99)),
            d=low,
            e=low + step,
            name=NAMES[int(draw.integers(len(NAMES)))],
            other=NAMES[int(draw.integers(len(NAMES)))],
            thing=THINGS[int(draw.integers(len(THINGS)))],
            place=PLACES[int(draw.integers(len(PLACES)))],
            topic=TOPICS[int(draw.integers(len(TOPICS)))],
        )
        texts[text] = None
    return list(texts)
