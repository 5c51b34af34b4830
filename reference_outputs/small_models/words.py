"""The words of the story grammar. Every list was written for llorch; `grammar.py` holds the sentences."""

from collections.abc import Sequence

GIRLS = "Mia Lily Anna Emma Rose Sara Ella Lucy Nora Zoe Ivy Grace Amy Ruby Clara Eva Molly Daisy Jane Kate".split()
BOYS = "Tom Ben Max Sam Leo Jack Tim Finn Noah Luke Oscar Adam Theo Paul Hugo Peter Dan Joe Eli Mark".split()
ANIMALS = (
    "fox rabbit bear cat dog mouse duck frog owl squirrel hedgehog deer turtle lamb pony kitten puppy goat "
    "hen bird penguin monkey elephant lion pig horse"
).split()
ANIMAL_NAMES = "Rusty Pip Coco Biscuit Pepper Momo Tilly Dot Patch Bobo Sunny Ziggy Poppy Teddy Luna Bruno".split()

LEXICON: dict[str, Sequence[str]] = {
    "size": ["little", "little", "small", "young"],
    "trait": (
        "kind brave shy clever curious quiet cheerful gentle honest patient funny careful friendly strong".split()
    ),
    "color": "red blue green yellow white black purple orange golden silver brown pink".split(),
    "look": ["new", "old", "little", "big", "shiny", "small"],
    "toy": (
        "ball kite boat drum hat book doll bell cup box shell stone key lamp scarf basket wagon whistle ring "
        "feather button coin bucket map blanket umbrella flute"
    ).split(),
    "food": ("apple pear cake pie cookie sandwich carrot peach plum muffin banana pancake").split(),
    "flavor": "apple pear carrot plum cherry berry pumpkin honey nut lemon".split(),
    "dish": ["cake", "pie"],
    "soup": ["warm soup", "hot soup", "warm milk", "honey tea", "fresh bread", "warm bread"],
    "fruit": "apples berries pears nuts cherries plums carrots mushrooms".split(),
    "place": [
        "to the park",
        "to the forest",
        "to the beach",
        "to the river",
        "to the hill",
        "to the garden",
        "to the market",
        "to the lake",
        "to the farm",
        "to the meadow",
        "to the barn",
        "to the pond",
        "to the bridge",
        "to the old mill",
        "to the village",
        "to the field",
        "to the orchard",
        "to the woods",
        "to the castle",
        "to the mountain",
    ],
    "place_in": [
        "in the park",
        "in the forest",
        "in the garden",
        "in the woods",
        "in the meadow",
        "in the field",
        "in the old castle",
        "in the village",
        "on the farm",
        "in the orchard",
    ],
    "hidden": [
        "under a bush",
        "behind a tree",
        "in the tall grass",
        "near the old well",
        "under a big leaf",
        "behind a rock",
        "next to the fence",
        "on top of a wall",
        "between two stones",
        "by the garden gate",
        "under the bridge",
        "in a pile of leaves",
    ],
    "indoors": [
        "under the bed",
        "behind the door",
        "under the table",
        "in the kitchen",
        "on the shelf",
        "in the box",
    ],
    "home": [
        "in a small house",
        "near the sea",
        "in a quiet valley",
        "by the river",
        "near a big forest",
        "on a green hill",
        "in a cozy house by the lake",
        "at the end of a long road",
        "next to an old mill",
        "on a small farm",
        "near the mountains",
    ],
    "hobby": [
        "sing",
        "dance",
        "paint",
        "swim",
        "run",
        "climb trees",
        "tell stories",
        "read books",
        "play in the sun",
        "look at the stars",
        "pick flowers",
        "bake bread",
        "jump in puddles",
        "count the clouds",
        "fly kites",
        "collect shells",
        "dig in the sand",
        "help others",
        "ask questions",
        "play hide and seek",
    ],
    "family": "mother father sister brother grandmother grandfather aunt uncle".split(),
    "sky": "sunny rainy windy warm cold quiet cloudy bright foggy snowy".split(),
    "part": ["day", "morning", "afternoon", "evening"],
    "flower": "rose daisy tulip sunflower lily violet".split(),
    "number": ["two", "three", "four", "five", "six", "seven"],
    "cause": [
        "only the wind in the trees",
        "only a tiny mouse",
        "only an open window",
        "only a sleepy owl",
        "only the rain on the roof",
        "only an old clock",
        "only a branch on the window",
    ],
}

# What is built, its bare name, what it takes.
BUILDS = [
    ("a boat", "boat", "wood and rope"),
    ("a tree house", "tree house", "wood and nails"),
    ("a kite", "kite", "paper and string"),
    ("a sand castle", "sand castle", "sand and shells"),
    ("a snowman", "snowman", "snow and stones"),
    ("a bridge", "bridge", "logs and stones"),
    ("a nest", "nest", "twigs and leaves"),
    ("a toy train", "toy train", "wood and paint"),
]

# A noise and the word for it later on.
NOISES = [
    ("a strange noise", "noise"),
    ("a soft song", "song"),
    ("a loud bang", "bang"),
    ("a quiet cry", "cry"),
    ("a funny sound", "sound"),
]
