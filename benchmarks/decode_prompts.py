"""Texts of several kinds to continue: some whose output repeats the prompt, some whose output does not.

What a model of 135 million parameters makes of an instruction has to be looked at: the kinds are named for what its
greedy output is, not for what it was asked.
"""

from __future__ import annotations

from typing import Final

LIGHTHOUSE = (
    "The lighthouse at Saltmarsh Point was built in 1874 by the engineer Walter Harrow, who had spent nine years "
    "drawing plans for it. It stands forty-one metres above the sea and its lamp can be seen for thirty "
    "kilometres on a clear night. During the great storm of 1911 the keeper, Ada Linden, kept the light burning "
    "for six days without sleep, and eleven ships found their way into the harbour. The lamp was changed to "
    "electricity in 1936, and the last keeper left in 1988. Today the tower is a museum that is open from April "
    "to October, and volunteers repaint it every third year. In the cellar hangs a map on which Harrow marked every "
    "wreck that he knew of, and beside it the bell of the schooner Good Intent, which a fisherman found in his nets."
)
ORCHARD = (
    "The orchard behind the old mill has two hundred and twelve apple trees, most of them planted before the war by "
    "the miller's widow, Hanna Brandt. She wrote the name of every tree into a small green book, together with the "
    "day on which it first bore fruit. In the winter of 1963 the frost split the bark of forty trees, and only a "
    "blanket of straw saved the rest. Her grandson Emil runs the place today with three helpers and a donkey called "
    "Moritz. They press about nine thousand litres of juice every autumn, sell it at the gate in brown bottles, and "
    "give what is left over to the school in the village. Visitors may pick their own apples on Saturdays, as long as "
    "they leave one on every branch for the birds."
)
STACK = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def peek(self):
        if not self.items:
            raise IndexError("peek at an empty stack")
        return self.items[-1]

    def size(self):
        return len(self.items)

    def is_empty(self):
        return len(self.items) == 0

    def clear(self):
        while self.items:
            self.items.pop()

    def copy(self):
        other = Stack()
        for item in self.items:
            other.push(item)
        return other
"""
ACCOUNT = """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        self.balance = self.balance + amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("the balance is too small")
        self.balance = self.balance - amount
        self.history.append(("withdraw", amount))

    def report(self):
        for kind, amount in self.history:
            print(kind, amount)
        print("balance", self.balance)
"""
MEAN = """def mean(values):
    total = 0
    for value in values:
        total = total + value
    return total / len(values)


def variance(values):
    average = mean(values)
    total = 0
    for value in values:
        total = total + (value - average) ** 2
    return total / len(values)
"""
PROMPTS: Final[dict[str, tuple[str, ...]]] = {
    "copy": tuple(
        f"Repeat the following text word for word, and nothing else.\n\n{text}" for text in (LIGHTHOUSE, ORCHARD)
    ),
    "summarise": (
        f"Which sentences sum this text up best? Quote them.\n\n{LIGHTHOUSE}",
        f"Summarise the following text in its own sentences.\n\n{ORCHARD}",
    ),
    "edit": (
        f"Rename `items` to `values` in this code.\n\n```python\n{STACK}```",
        f"Rename the class to `Purse` and print all of the code.\n\n```python\n{ACCOUNT}```",
    ),
    "rewrite": (
        f"Summarise the following text in three sentences, using its own words.\n\n{LIGHTHOUSE}",
        f"Rename the variable `total` to `result` in this code and print all of the code.\n\n```python\n{MEAN}```",
    ),
    "story": (
        "Tell me a story about a fox who wants to learn to sail.",
        "Write an email that invites colleagues to a picnic.",
    ),
}
"""By kind: asked to summarise or edit, the model mostly repeats the text; under ``rewrite`` it says it in other words,
and under ``story`` there is nothing to repeat."""
