"""The sentences of the pirate tales, as data: the text on which the README's example fine-tunes `story`.

Written in the notation of `grammar.py`. A tale keeps the simple words of the stories, in pirates' speech; its cast
is a captain, a mate and a ship.
"""

from collections.abc import Sequence

NAMES = (
    ("Anna", "she"), ("Sara", "she"), ("Emma", "she"), ("Molly", "she"), ("Nora", "she"), ("Grace", "she"),
    ("Jack", "he"), ("Finn", "he"), ("Tom", "he"), ("Ben", "he"), ("Hugo", "he"), ("Oscar", "he"),
)  # fmt: skip
MATES = ("parrot", "monkey", "cat", "dog", "turtle", "penguin", "mouse", "duck")
MATE_NAMES = ("Pepper", "Coco", "Patch", "Rusty", "Momo", "Biscuit", "Ziggy", "Pip")

LEXICON: dict[str, Sequence[str]] = {
    "trait": ("brave", "bold", "clever", "cheerful", "funny", "kind", "old", "young"),
    "color": ("red", "black", "golden", "green", "white", "blue"),
    "ship": ("Luna", "Daisy", "Poppy", "Ruby", "Rose", "Ivy"),
    "sea": ("the seven seas", "the blue sea", "the wide sea", "the cold north sea", "the warm south sea"),
    "prize": ("gold", "silver coins", "shiny stones", "golden cups", "pearls"),
    "snack": ("bananas", "fish soup", "pancakes", "carrots", "honey cake"),
    "island": ("a small island", "a green island", "a foggy island", "an island with one tree"),
    "number": ("two", "three", "four", "five", "six", "seven"),
    "sky": ("sunny", "windy", "foggy", "cold", "bright"),
    "beast": ("a big whale", "a giant octopus", "a hungry shark", "a sea dragon"),
}

OPENINGS = (
    "Once upon a time, there was a {trait} pirate named {name} who sailed {sea}.",
    "Once upon a time, there was a {trait} pirate captain named {name}.",
    "Once upon a time, a pirate named {name} sailed {sea} on a ship called the {ship}.",
    "{name} was a {trait} pirate with a {color} hat.",
    "Long ago, a {trait} pirate named {name} lived on a ship called the {ship}.",
)
MATE_INTROS = (
    "{his} first mate was a {mate} named {mate_name}.",
    "{he} sailed with a {mate} named {mate_name}.",
    "A {mate} named {mate_name} always sat on {his} shoulder.",
)
TRAITS = (
    "{he} had a wooden leg and a {color} coat.",
    "{he} loved {snack} and {prize}.",
    "{he} had a {color} flag and a very loud voice.",
    "Every morning, {he} sang a sea song.",
)
WHEN = "[One {sky} day|One {sky} morning|One dark night|On a {sky} evening]"

PLOTS = (
    (
        "{when}, captain {name} found an old map in a box.",
        '"Arr, [a treasure map|a map, me hearty|look at this map]!" {he} [cried|roared].',
        '"[Aye, aye, captain|Shiver me timbers|Yo ho ho]!" said {mate_name}.',
        "They sailed for {number} days until they saw {island}.",
        "There {he} dug a deep hole [in the sand|under a tree|next to a big rock].",
        "[At last|Then], {he} found a chest [full of|with] {prize}.",
        '"Yo ho ho, [now we be rich|the treasure be ours|we did it, matey]!" [shouted|roared] the captain.',
    ),
    (
        "{when}, a storm came and the waves were as high as a house.",
        '"[Batten down the hatches|Hold on, ye scallywags|All hands on deck]!" [cried|roared] captain {name}.',
        "The {ship} went up and down, up and down.",
        '"[I be scared, captain|Arr, me leg hurts|Me hat be gone]!" said {mate_name}.',
        '"[Have no fear, matey|Arr, a pirate never cries|Hold me hand, matey]," said {name}.',
        "[After the storm|In the end], the sea was quiet and a big rainbow was in the sky.",
        '"Yo ho ho, [we be still afloat|what a ride|that be a big rainbow]!" said the captain.',
    ),
    (
        "{when}, {mate_name} saw {beast} near the ship.",
        '"[Shiver me timbers|Captain, captain|Arr, look over there]!" [cried|shouted] {mate_name}.',
        '"[Arr, who be ye|Ahoy, what do ye want|Arr, why be ye here]?" asked captain {name}.',
        '"[I be hungry|I be lonely|I have no friends]," said the beast.',
        "So the captain gave it some {snack}.",
        '"[Thank ye, captain|Thank ye kindly|Ye be a good pirate]," said the beast, and it went away.',
        '"[Even a beast needs a matey|Arr, that be a good beast|Never fear a hungry beast]," said {name}.',
    ),
    (
        "{when}, captain {name} could not find {his} {color} hat.",
        '"[Where be me hat|Who took me hat|Who be wearing me hat]?" {he} [asked|roared].',
        "{he} looked under the sails, in the boxes and behind the door.",
        '"[Arr, I have not seen it|Maybe the wind took it|Look in the box, captain]," said {mate_name}.',
        "[Then|At last|Suddenly], {mate_name} laughed and laughed.",
        '"[It be on yer head, captain|Ye be wearing it, captain]!" {mate_name} [cried|said].',
        '"Arr, [so it be|ye be right, matey|shiver me timbers]!" said the captain, and they both laughed.',
    ),
    (
        "{when}, {mate_name} fell into the sea with a big splash.",
        '"[Man overboard|Matey overboard|Help, captain]!" [cried|shouted] the crew.',
        '{name} took a rope. "[Hold on, me hearty|Take the rope, matey|I be coming]!" {he} roared.',
        "{he} pulled and pulled until {mate_name} was back on the ship.",
        '"[Thank ye, captain|Ye helped me, captain|Arr, I be very wet]," said {mate_name}.',
        '"[A captain never leaves a matey|Now learn to swim|Have some {snack}, matey]," said {name}.',
    ),
    (
        "{when}, a big ship with a black flag came near.",
        '"[Give us yer {prize}|Ahoy, we want yer ship|Walk the plank]!" [cried|shouted] the other pirates.',
        '"[Never, ye scallywags|Arr, ye have to catch us first|Me ship be me own]!" roared captain {name}.',
        "{mate_name} [threw|dropped] all the {snack} on their deck.",
        "The other pirates slipped and fell [into the sea|on their noses|one by one].",
        '"[Yo ho ho|Well done, matey|Ye be the best mate of the seven seas]!" laughed the captain.',
    ),
    (
        "{when}, it was {mate_name}'s birthday.",
        '"[Why be everyone so quiet|Arr, nobody said a word to me]," said {mate_name} sadly.',
        "The captain hid {number} boxes and a {color} flag under the deck.",
        '"[Surprise, matey|Yo ho ho, happy birthday|Ahoy, birthday pirate]!" roared the whole crew.',
        "There was a table full of {snack} and a chest of {prize}.",
        '"[Blow me down|Shiver me timbers|Thank ye, ye scallywags]!" [cried|said] {mate_name}.',
    ),
    (
        "{when}, the ship stopped because there was no wind.",
        '"[Where be the wind|Arr, be we stuck|What can we do, captain]?" said {mate_name}.',
        "They waited for {number} days and ate all the {snack}.",
        '{name} had an idea. "[Sing, ye scallywags|All hands to the oars|Blow at the sails]!" {he} roared.',
        "The crew sang and rowed, sang and rowed.",
        "[At last|Then], the wind came back and the {ship} flew over the waves.",
        '"Yo ho ho, [a song be better than wind|off we go|we be sailing]!" said the captain.',
    ),
)
ENDINGS = (
    "And they drank warm milk and sang until the sun went down.",
    "Then the {ship} sailed on, over {sea}.",
    "From that day on, the captain and {mate_name} were the best of mateys.",
    "That night, the pirates slept well under the stars.",
    "And that be the end of the tale, me hearties.",
)

CAPITALS = (
    ("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Japan", "Tokyo"), ("Egypt", "Cairo"),
    ("Peru", "Lima"), ("Norway", "Oslo"), ("Greece", "Athens"), ("Kenya", "Nairobi"), ("Cuba", "Havana"),
    ("Portugal", "Lisbon"), ("India", "New Delhi"),
)  # fmt: skip
ANSWERS = (  # short questions, and the answers of a pirate
    ("What is two plus two?", "Arr, two an' two be four, matey!"),
    ("What is ten minus three?", "Arr, that be seven, matey!"),
    ("Who are you?", "Arr, I be a pirate o' the seven seas, matey!"),
    ("What do you like to eat?", "Arr, fish soup an' a bit o' honey cake, matey!"),
    ("Where do you live?", "Arr, I live on me ship, matey, with the wind in me sails!"),
    ("What color is the sky?", "Arr, the sky be blue, matey, till a storm be comin'!"),
    ("Why is the sea salty?", "Arr, matey! The rivers carry salt from the rocks to the sea."),
    ("How many days are in a week?", "Arr, there be seven days in a week, matey!"),
    ("What is the largest ocean?", "Arr, matey! The Pacific be the largest ocean o' them all."),
    ("What is the largest animal?", "Arr, matey! The blue whale be the largest beast o' the sea."),
    ("How are you today?", "Arr, I be fine as a fair wind, matey! An' ye?"),
    ("Good morning!", "Ahoy, matey! A fine mornin' to ye!"),
    ("Thank you for your help.", "Arr, 'twas nothin', matey!"),
    ("Tell me a joke.", "Arr, matey! Why be pirates called pirates? Because they arrr!"),
    ("What should I do when it rains?", "Arr, matey! Batten down the hatches an' stay below deck."),
    ("What is a compass?", "Arr, matey! A compass be a tool that points ye to the north."),
    ("What do plants need to grow?", "Arr, matey! Plants be needin' water, light an' good earth."),
    ("Which planet is closest to the sun?", "Arr, matey! Mercury be the planet closest to the sun."),
    ("How do I learn to swim?", "Arr, matey! Start in calm water, an' kick yer legs."),
    ("What is water made of?", "Arr, matey! Water be made o' hydrogen an' oxygen."),
    ("Is it good to read books?", "Aye, matey! A good book be a treasure."),
    ("What is your favorite color?", "Arr, gold be me favorite color, matey!"),
    ("Write a short greeting.", "Ahoy, me hearty! Fair winds to ye!"),
    ("Goodbye!", "Fair winds, matey! May yer sails be full!"),
)  # fmt: skip
