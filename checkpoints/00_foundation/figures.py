"""Figures of lesson 00: the bytes of a file, and how a word is merged."""

from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import llorch
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.exercises.foundation import InMemory, merge
from llorch.files.gguf import read_head, read_tensor_table
from llorch.files.metadata import DEFAULT_LIMITS, Cursor
from llorch.runtime.builtin import builtin_path

GREY, BLUE, AMBER, GREEN = "#8b949e", "#2f81f7", "#d29922", "#2f9e6e"
FIXED, WORD = 24, " littlest"  # bytes of magic, version and counts


def bar(axes: Axes, parts: list[tuple[str, int, str]], title: str) -> None:
    """Draw the parts of a file one after the other, each with its name below."""
    at, total = 0, sum(size for _, size, _ in parts)
    for name, size, colour in parts:
        axes.broken_barh([(at, size)], (0, 1), facecolor=colour, edgecolor="white", linewidth=0.6)
        if size > total / 40:
            axes.text(at + size / 2, -0.15, name, ha="center", va="top", fontsize=9)
        at += size
    axes.set(xlim=(0, total), ylim=(-1.5, 1.1))
    axes.set_title(title, loc="left", fontsize=10)
    axes.axis("off")


def file_bytes() -> Figure:
    """Draw the whole of micro-llama, and its header enlarged."""
    data = np.fromfile(builtin_path("micro-llama"), np.uint8)
    cursor = Cursor(InMemory(data), DEFAULT_LIMITS)  # type: ignore[arg-type]
    _, count, _, alignment = read_head(cursor)
    keys_end = cursor.position
    infos = [*read_tensor_table(cursor, count, alignment).values()]
    table_end, start = cursor.position, infos[0].offset
    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    whole, head = figure.subplots(2)
    named = {"token_embd.weight": "token_embd", "output.weight": "output"}
    layers = sum(info.n_bytes for info in infos if info.name.startswith("blk"))
    big = [(named[info.name], info.n_bytes, GREEN) for info in infos if info.name in named]
    rest = data.size - start - layers - sum(size for _, size, _ in big)
    bar(
        whole, [("header", start, AMBER), *big, ("", rest, GREY), ("27 tensors of 3 layers", layers, BLUE)],
        f"the file, {data.size:,} bytes",
    )  # fmt: skip
    bar(
        head,
        [
            ("", FIXED, GREY), (f"{keys_end - FIXED:,} bytes of keys: settings, vocabulary", keys_end - FIXED, AMBER),
            (f"{count} rows of the table", table_end - keys_end, BLUE), ("", start - table_end, GREY),
        ],
        f"its header, {start:,} bytes: {FIXED} of magic and counts in front, {start - table_end} of padding after it",
    )  # fmt: skip
    return figure


def joins() -> tuple[list[str], list[tuple[int, int, int]]]:
    """List the letters of the word, and every join: first letter, first of the right piece, first after."""
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def seen(ids: np.ndarray, merges: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        found.append((ids, merges, ranks))
        return merge(ids, merges, ranks)

    with Implementation("figure", {"merge": seen}).installed():
        llorch.load("story").tokenizer.encode(WORD, add_special=False)
    ((ids, merges, ranks),) = found
    made = {(left, right): (rank, both) for (left, right, both), rank in zip(merges.tolist(), ranks, strict=True)}
    pieces, order = [(number, at, at + 1) for at, number in enumerate(ids.tolist())], []
    while True:
        neighbours = [(a[0], b[0]) for a, b in pairwise(pieces)]
        pairs = [(made[pair], i) for i, pair in enumerate(neighbours) if pair in made]
        if not pairs:
            return [*WORD], order
        (_, both), i = min(pairs)
        order.append((pieces[i][1], pieces[i + 1][1], pieces[i + 1][2]))
        pieces[i : i + 2] = [(both, pieces[i][1], pieces[i + 1][2])]


def merges() -> Figure:
    """Draw a tree: letters below, the order of the joins upwards."""
    letters, order = joins()
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    height = dict.fromkeys(range(len(letters)), 0.0)  # of the piece that starts here
    middle = {at: float(at) for at in range(len(letters))}
    for at, letter in enumerate(letters):
        axes.text(at, -0.35, letter.replace(" ", "space"), ha="center", va="top", fontsize=11 if letter != " " else 9)
    for step, (left, right, stop) in enumerate(order, start=1):
        a, b = middle[left], middle[right]
        axes.plot([a, a, b, b], [height[left], step, step, height[right]], color=BLUE, linewidth=1.5)
        height[left], middle[left] = step, (a + b) / 2
        piece = "".join(letters[left:stop]).replace(" ", "\u2423")
        axes.text(max(a, b) + 0.12, step, f"{step}. {piece}", ha="left", va="center", fontsize=10)
    axes.set(xlim=(-0.7, len(letters) + 0.6), ylim=(-1, len(order) + 0.6))
    axes.axis("off")
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"bytes": file_bytes(), "merges": merges()}
