"""Figures of lesson 00: the bytes of a file, and the merges of a word."""

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
    offset, total = 0, sum(size for _, size, _ in parts)
    for name, size, colour in parts:
        axes.broken_barh([(offset, size)], (0, 1), facecolor=colour, edgecolor="white", linewidth=0.6)
        if size > total / 40:
            axes.text(offset + size / 2, -0.15, name, ha="center", va="top", fontsize=9)
        offset += size
    axes.set(xlim=(0, total), ylim=(-1.5, 1.1))
    axes.set_title(title, loc="left", fontsize=10)
    axes.axis("off")


def file_bytes() -> Figure:
    """Draw the whole of micro-llama, and its header enlarged."""
    raw = np.fromfile(builtin_path("micro-llama"), np.uint8)
    cursor = Cursor(InMemory(raw), DEFAULT_LIMITS)  # type: ignore[arg-type]
    _, count, _, alignment = read_head(cursor)
    keys_end = cursor.position
    infos = [*read_tensor_table(cursor, count, alignment).values()]
    table_end, start = cursor.position, infos[0].offset
    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    file_axes, head = figure.subplots(2)
    labels = {"token_embd.weight": "token_embd", "output.weight": "output"}
    layers = sum(info.n_bytes for info in infos if info.name.startswith("blk"))
    big = [(labels[info.name], info.n_bytes, GREEN) for info in infos if info.name in labels]
    small = raw.size - start - layers - sum(size for _, size, _ in big)
    bar(
        file_axes, [("header", start, AMBER), *big, ("", small, GREY), ("27 tensors of 3 layers", layers, BLUE)],
        f"the file, {raw.size:,} bytes",
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
    """Return the word's letters, and every merge: start of the left piece, start of the right piece, end."""
    calls: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def record_merge(ids: np.ndarray, merges: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        calls.append((ids, merges, ranks))
        return merge(ids, merges, ranks)

    with Implementation("figure", {"merge": record_merge}).installed():
        llorch.load("story").tokenizer.encode(WORD, add_special=False)
    ((ids, merges, ranks),) = calls
    rules = {(first, second): (rank, new) for (first, second, new), rank in zip(merges.tolist(), ranks, strict=True)}
    pieces, order = [(number, position, position + 1) for position, number in enumerate(ids.tolist())], []
    while True:
        neighbours = [(a[0], b[0]) for a, b in pairwise(pieces)]
        pairs = [(rules[pair], i) for i, pair in enumerate(neighbours) if pair in rules]
        if not pairs:
            return [*WORD], order
        (_, new), i = min(pairs)
        order.append((pieces[i][1], pieces[i + 1][1], pieces[i + 1][2]))
        pieces[i : i + 2] = [(new, pieces[i][1], pieces[i + 1][2])]


def merges() -> Figure:
    """Draw the merges as a tree: letters below, later merges higher."""
    letters, order = joins()
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    height = dict.fromkeys(range(len(letters)), 0.0)  # of the piece that starts here
    middle = {x: float(x) for x in range(len(letters))}
    for x, letter in enumerate(letters):
        axes.text(x, -0.35, letter.replace(" ", "space"), ha="center", va="top", fontsize=11 if letter != " " else 9)
    for step, (first, second, stop) in enumerate(order, start=1):
        a, b = middle[first], middle[second]
        axes.plot([a, a, b, b], [height[first], step, step, height[second]], color=BLUE, linewidth=1.5)
        height[first], middle[first] = step, (a + b) / 2
        piece = "".join(letters[first:stop]).replace(" ", "\u2423")
        axes.text(max(a, b) + 0.12, step, f"{step}. {piece}", ha="left", va="center", fontsize=10)
    axes.set(xlim=(-0.7, len(letters) + 0.6), ylim=(-1, len(order) + 0.6))
    axes.axis("off")
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"bytes": file_bytes(), "merges": merges()}
