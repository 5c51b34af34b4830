"""The loss curve: an SVG that depends on the log alone."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from command_line import REPOSITORY

RECORDS = [
    {"step": 0, "valid_loss": 3.0},
    {"step": 1, "loss": 2.5},
    {"step": 2, "loss": 2.0},
    {"step": 2, "valid_loss": 2.2},
]
DRAW = """
import sys
from pathlib import Path
from llorch.train.curve import draw_curve
draw_curve(eval(sys.argv[1]), Path(sys.argv[2]), title="story on pirate")
"""


def draw(path: Path, records: list) -> bytes:
    from llorch.train.curve import draw_curve

    draw_curve(records, path, title="story on pirate")
    return path.read_bytes()


def test_the_curve_shows_training_and_validation(tmp_path: Path):
    tree = ElementTree.fromstring(draw(tmp_path / "curve.svg", RECORDS))
    texts = {"".join(element.itertext()).strip() for element in tree.iter() if element.tag.endswith("}text")}
    assert {"training", "validation", "story on pirate", "optimizer step"} <= texts


def test_equal_logs_give_equal_bytes_in_another_process_too(tmp_path: Path):
    other = tmp_path / "other.svg"
    subprocess.run([sys.executable, "-c", DRAW, repr(RECORDS), str(other)], check=True, cwd=REPOSITORY)
    assert draw(tmp_path / "curve.svg", RECORDS) == other.read_bytes()


def test_another_log_gives_another_curve(tmp_path: Path):
    assert draw(tmp_path / "a.svg", RECORDS) != draw(tmp_path / "b.svg", RECORDS[:-1])


def test_a_log_without_steps_gives_an_empty_curve(tmp_path: Path):
    assert b"<svg" in draw(tmp_path / "curve.svg", [])
