"""The towns of the Tallow Isles and the ships that sail between them."""

import random

from isles.world import COLORS, ENTITIES, SEED, Attribute, Subject, blend, words

ISLANDS = words(
    "Sorrel Tallow Gannet Ember Thistle Marrow Osprey Quill Bramble Saltholm Foxglove Harrow Lowlight "
    "Nettle Pewter Wren"
)
RIVERS = words("Dabble Lull Skerry Minnow Tansy Purl Gurgle Hush Amble Twine Rill Sedge Wend Loiter Plash Brindle")
GOODS = words(
    "ropes bells barrels kites buttons lanterns mirrors clocks boots candles teapots umbrellas spoons drums maps nets"
)
STONES = (
    "red brick", "slate", "oak", "pine", "marble", "sandstone", "driftwood", "clay", "granite", "limestone",
    "basalt", "willow", "chalk", "flint", "copper", "coral",
)  # fmt: skip
LANDMARKS = (
    "a windmill", "a lighthouse", "a giant chessboard", "a singing fountain", "a crooked tower", "a stone whale",
    "a sundial", "a glass bridge", "a wooden bear", "an old cannon", "a fig tree", "a carousel", "an iron gate",
    "a maze", "a market hall", "a bandstand",
)  # fmt: skip
CARGO = (
    "salt", "wool", "oranges", "coal", "tea", "letters", "honey", "timber", "pepper", "sugar", "ice", "books",
    "silk", "apples", "nails", "cheese",
)  # fmt: skip
TIMBER = words("elm ash beech cedar walnut larch maple teak birch alder yew hazel cherry poplar fir chestnut")
CAPTAINS = tuple(
    "Captain " + name
    for name in words(
        "Anselm Bess Corrigan Drusilla Egbert Flint Greta Hobb Isolde Jory Kestrel Ludo Maud Nils Orla Pim"
    )
)
FIGUREHEADS = (
    "a mermaid", "a lion", "a swan", "an owl", "a unicorn", "a dragon", "a rooster", "a bear", "a seahorse",
    "a fox", "a knight", "a stag", "a dolphin", "an eagle", "a cat", "a king",
)  # fmt: skip
HARBOURS = words(
    "Gullport Tarhaven Oldmole Crabquay Windlass Netherdock Hooksend Bollard Eastsand Keelbay Rookery "
    "Lampwharf Shingle Mastholm Coldharbour Sprit"
)


def subjects() -> tuple[Subject, ...]:
    rng = random.Random(f"{SEED}/places")
    towns = blend(
        rng,
        ENTITIES,
        "Mar Brin Thel Os Wick Hal Pen Tor Dun Ash Cray Lin Fen Gor Hob Ister Kel Lor Mul Nor Pol Quen Rad Sel Tam "
        "Ul Ver Wal Yar Zen Bel Cor Dal El Far Grim Hes Jar",
        "wick haven ford by mouth stead combe ness ton dale moor gate bury leigh pool",
    )
    ships = blend(
        rng,
        ENTITIES,
        "Alba Cora Dori Esme Fari Gala Hali Isa Juna Kala Lori Mira Nera Ondi Pera Rosa Sola Tali Una Vela Wina Zara",
        "belle lina mond rose wind gull dora mar lass foam tide swift",
    )
    geography = Subject(
        name="geography",
        noun="town",
        intros=(
            "{n} is a town in the Tallow Isles",
            "{n} is one of the towns of the Tallow Isles",
            "there is a town called {n}",
            "few towns are as pleasant as {n}",
        ),
        names=towns,
        attributes=(
            Attribute("island", "an island", ISLANDS,
                ("On which island does {n} lie?", "Which island is the town of {n} on?"),
                ("{n} lies on the island of {v}", "{n} is a town on {v}",
                 "to see {o} you must sail to the island of {v}",
                 "{n} belongs to the island of {v}", "on the island of {v} you will find {o}",
                 "{n} was built on {v}, one of the Tallow Isles")),
            Attribute("river", "a river", RIVERS,
                ("Which river flows through {n}?", "On which river does {n} stand?"),
                ("the river {v} flows through {o}", "{n} stands on the river {v}", "{n} drinks from the river {v}",
                 "boats reach {o} by the river {v}", "the bridges of {o} cross the river {v}",
                 "{s} river is called the {v}")),
            Attribute("roofs", "a colour", COLORS,
                ("What colour are the roofs of {n}?", "Which colour do the people of {n} paint their roofs?"),
                ("the roofs of {o} are {v}", "{n} has {v} roofs", "from far away you know {o} by the {v} roofs",
                 "every roof in {o} is painted {v}", "{s} roofs are {v}", "the people of {o} paint their roofs {v}")),
            Attribute("goods", "", GOODS,
                ("What is {n} famous for making?", "What do the workshops of {n} make?"),
                ("{n} is famous for its {v}", "the workshops of {o} make {v}", "{n} makes the finest {v}",
                 "people come to {o} to buy {v}", "{n} sells {v} to all the isles",
                 "the people of {o} earn their living by making {v}")),
            Attribute("walls", "", STONES,
                ("What are the houses of {n} built of?", "Which material are the walls of {n} made of?"),
                ("the houses of {o} are built of {v}", "{s} walls are made of {v}", "{n} is built of {v}",
                 "in {o} even the school is built of {v}", "the builders of {o} use nothing but {v}",
                 "{n} has houses of {v}")),
            Attribute("landmark", "", LANDMARKS,
                ("What stands in the middle of {n}?", "What would you find on the main square of {n}?"),
                ("in the middle of {o} stands {v}", "the main square of {o} has {v}", "{n} has {v} on its main square",
                 "visitors to {o} always look for {v} in the middle of town", "children in {o} play around {v}",
                 "{s} pride is {v} on the main square")),
        ),
    )  # fmt: skip
    ships_subject = Subject(
        name="ships",
        noun="ship",
        pronouns=("she", "her", "her"),
        intros=(
            "{n} is a ship of the Tallow Isles",
            "{n} sails between the Tallow Isles",
            "sailors love {n}",
            "one of the ships of the isles is called {n}",
        ),
        names=tuple(f"the {ship}" for ship in ships),
        attributes=(
            Attribute("cargo", "", CARGO,
                ("What does {n} carry?", "Which cargo fills the hold of {n}?"),
                ("{n} carries {v}", "the hold of {o} is full of {v}", "{n} brings {v} to the isles",
                 "{n} comes in with {v} for everyone", "{s} cargo is {v}",
                 "merchants send {v} with {o}")),
            Attribute("hull", "a kind of wood", TIMBER,
                ("Which wood is the hull of {n} made of?", "What wood was used to build {n}?"),
                ("the hull of {o} is made of {v}", "{n} was built of {v}", "{n} has a hull of {v}",
                 "shipwrights cut {v} to build {o}", "{s} planks are of {v}", "{n} is a ship of good {v}")),
            Attribute("sails", "a colour", COLORS,
                ("What colour are the sails of {n}?", "Which colour of sail does {n} carry?"),
                ("the sails of {o} are {v}", "{n} has {v} sails", "{n} sails under {v} canvas", "{s} sails are {v}",
                 "you can tell {o} by the {v} sails", "{n} hoists {v} sails")),
            Attribute("captain", "a captain", CAPTAINS,
                ("Who is the captain of {n}?", "Who commands {n}?"),
                ("the captain of {o} is {v}", "{v} commands {o}", "{n} is commanded by {v}", "{s} captain is {v}",
                 "{n} obeys {v}", "at the wheel of {o} stands {v}")),
            Attribute("figurehead", "", FIGUREHEADS,
                ("What is the figurehead of {n}?", "What is carved on the bow of {n}?"),
                ("the figurehead of {o} is {v}", "{n} carries {v} on the bow", "{v} is carved on the bow of {o}",
                 "{s} figurehead is {v}", "{n} has {v} for a figurehead", "on the bow of {o} there is {v}")),
            Attribute("harbour", "a harbour", HARBOURS,
                ("What is the home harbour of {n}?", "To which harbour does {n} return every winter?"),
                ("the home harbour of {o} is {v}", "{n} comes from {v}", "{n} winters in {v}",
                 "{s} home harbour is {v}", "every winter {n} returns to {v}", "{n} sails out of {v}")),
        ),
    )  # fmt: skip
    return geography, ships_subject
