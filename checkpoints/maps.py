"""Maps of the course as SVG: the strip of a lesson, and the boxes of all lessons on the first page."""

from collections.abc import Sequence

from llorch.apps.learn.lessons import BLOCKS, LESSONS, Lesson
from llorch.stages.table import CHECKPOINTS

FORWARD = (  # boxes of the strip in the order of the model, each with the lessons that light it
    ("ids", "00 12"), ("embed", "00 13"), ("norm", "01 14"), ("q k v", "02 05b 13"), ("rope", "01b 14"),
    ("cache", "03 05b"), ("scores", "04 05b"), ("mix", "05 05b 13"), ("+", "07"), ("norm", "01 14"),
    ("swiglu", "06 06b 13"), ("+", "07"), ("norm", "01 08 14"), ("logits", "08 13"), ("pick", "09 10 11 12"),
)  # fmt: skip
LAYER = (2, 11)  # first and last box of a layer
TRAINING = (
    ("forward", ""), ("adapter", "15"), ("loss", "16"), ("gradients", "17"), ("step", "18"), ("curve", "19"),
    ("merge", "20"),
)  # fmt: skip
PITCH = 28  # units from one box of the strip to the next
MAP_COLUMNS = 9
GREY, LIT = "#7d7d7d", "#c4611f"  # on both grounds 4 to 1 or more
STYLE = f"""text {{ font: 11px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: {GREY} }}
rect, path {{ fill: none; stroke: {GREY} }}
.lesson text, .centre {{ text-anchor: middle }}
.lesson .no {{ font-size: 20px; font-weight: 600 }}
.step text, .centre {{ font-size: 13px }}
.lit text {{ fill: {LIT}; font-weight: 700 }}
.lit rect {{ fill: {LIT}; stroke: {LIT} }}"""


def strip(number: str) -> str:
    """Draw the steps of the model, or of training, in one row of boxes; those of the lesson are lit."""
    boxes = TRAINING if any(number in numbers.split() for _, numbers in TRAINING) else FORWARD
    lit = [label for label, numbers in boxes if number in numbers.split()]
    parts = [_step(label, PITCH * n, number in numbers.split()) for n, (label, numbers) in enumerate(boxes)]
    if boxes is FORWARD:
        first, last = (PITCH * n for n in LAYER)
        parts.append(f'<path d="M{first + 4} 85v5H{last + 24}v-5"/>')
        parts.append(f'<text class="centre" x="{(first + last) / 2 + 14:g}" y="105">one layer, repeated</text>')
    title = f"Lesson {number}, {CHECKPOINTS[number].replace('_', ' ')}: {', '.join(lit)}"
    return _svg(title, PITCH * len(boxes) + 44, 110 if boxes is FORWARD else 84, parts)


def path_map() -> str:
    """Draw a box for each lesson, block by block, in the order of the path."""
    parts, column, row = [], 0, 0
    for title, lessons in BLOCKS.items():
        n_columns = max(2, len(lessons))  # a title needs two
        if column + n_columns > MAP_COLUMNS:
            column, row = 0, row + 1
        x, y = 4 + 80 * column, 86 * row
        parts.append(f'<text x="{x}" y="{y + 14}">{title}</text>')
        parts += [_lesson(lesson, x + 80 * n, y + 20) for n, lesson in enumerate(lessons)]
        column += n_columns
    return _svg(f"The {len(LESSONS)} lessons in their order", 80 * MAP_COLUMNS + 4, 86 * (row + 1), parts)


def _step(label: str, x: int, is_lit: bool) -> str:
    return (
        f'<g class="step{" lit" if is_lit else ""}"><rect x="{x + 4}" y="60" width="20" height="20" rx="4"/>'
        f'<text transform="translate({x + 17} 55) rotate(-45)">{label}</text></g>'
    )


def _lesson(lesson: Lesson, x: int, y: int) -> str:
    first, _, second = lesson.name.partition("_")
    words = [first, second] if len(lesson.name) > 11 else [f"{first} {second}".strip()]
    lines = "".join(f'<text x="{x + 37}" y="{y + 38 + 13 * n}">{word}</text>' for n, word in enumerate(words))
    return (
        f'<g class="lesson"><rect x="{x}" y="{y}" width="74" height="58" rx="6"/>'
        f'<text class="no" x="{x + 37}" y="{y + 23}">{lesson.number}</text>{lines}</g>'
    )


def _svg(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">
<title>{title}</title>
<style>
{STYLE}
</style>
{chr(10).join(parts)}
</svg>
"""
