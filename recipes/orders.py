"""The quickstart's skill: notes about orders, rewritten in a fixed form. Made up by a seeded generator.

    Twelve green boxes for David Rivera, due 26 July 2025.  ->  2025-07-26 | 12 x green boxes | Rivera

Every answer can be checked exactly. The families of the held-out notes never occur in training.
"""

import random
from collections.abc import Sequence

INSTRUCTION = "Rewrite the order as YYYY-MM-DD | quantity x goods | family name."
NOTES = (
    "{first} {family} ordered {number} {goods} on {month} {day}, {year}.",
    "On {day} {month} {year}, {number} {goods} were sold to {first} {family}.",
    "Please send {number} {goods} to {first} {family} by {month} {day}, {year}.",
    "{number} {goods} for {first} {family}, due {day} {month} {year}.",
)
NUMBERS = tuple("two three four five six seven eight nine ten eleven twelve".split())
MONTHS = tuple("January February March April May June July August September October November December".split())
COLOURS = tuple("red blue green black white yellow".split())
GOODS = tuple("lamps chairs tables boxes books bottles shirts mugs carpets clocks".split())
FIRST_NAMES = tuple(
    "Ada Boris Clara David Elena Felix Grace Henry Irene Jonas Karin Leo Maria Nora Oscar Paula".split()
)
TRAIN_FAMILIES = tuple(
    "Adams Baker Carter Dixon Ellis Foster Grant Hughes Irwin Jensen Keller Lopez Miller Norton Owens Parker".split()
)
HELD_OUT_FAMILIES = tuple("Bishop Coleman Fisher Hansen Morgan Quinn Rivera Turner".split())


def make_orders(count: int, seed: int, families: Sequence[str] = TRAIN_FAMILIES) -> list[dict[str, str]]:
    """`count` different notes with their answers, as rows of ``prompt`` and ``completion``; equal for equal seeds."""
    generator = random.Random(seed)
    orders: dict[str, str] = {}
    while len(orders) < count:
        quantity, month = generator.randint(2, 12), generator.randint(1, 12)
        day, year = generator.randint(1, 28), generator.randint(2001, 2029)
        goods = f"{generator.choice(COLOURS)} {generator.choice(GOODS)}"
        family = generator.choice(families)
        note = generator.choice(NOTES).format(
            first=generator.choice(FIRST_NAMES),
            family=family,
            number=NUMBERS[quantity - 2],
            goods=goods,
            month=MONTHS[month - 1],
            day=day,
            year=year,
        )
        orders[note[0].upper() + note[1:]] = f"{year}-{month:02d}-{day:02d} | {quantity} x {goods} | {family}"
    return [{"prompt": note, "completion": answer} for note, answer in orders.items()]


def conversation(order: dict[str, str]) -> list[dict[str, str]]:
    """The order as a conversation: the instruction, the note, the answer."""
    return [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": order["prompt"]},
        {"role": "assistant", "content": order["completion"]},
    ]


def exact_matches(answers: Sequence[str], orders: Sequence[dict[str, str]]) -> int:
    """How many answers are right to the letter."""
    return sum(answer == order["completion"] for answer, order in zip(answers, orders, strict=True))
